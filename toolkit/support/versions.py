"""Which packages are installed, and in which version."""

from collections.abc import Iterable

__all__ = ["versions"]


def versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed here, by their names."""
    from importlib import metadata  # It takes a quarter of an agent's start, which needs none of it.

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
