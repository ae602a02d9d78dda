"""Which packages are installed, and their versions."""

from collections.abc import Iterable

__all__ = ["versions"]


def versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed here, by their names."""
    from importlib import metadata  # This import takes a quarter of an agent's start, and agents don't need it.

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
