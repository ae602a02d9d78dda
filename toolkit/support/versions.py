"""Which versions of other packages are installed, whatever build of them it is."""

from collections.abc import Iterable

# The packages that bring a module of the name.
BUILDS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "tensorflow-intel"),
    "keras": ("keras", "keras-nightly"),
}


def builds(name: str) -> dict[str, str]:
    """Returns the installed packages that bring a module, with their versions; {} if there is none."""
    import importlib.metadata  # Takes a quarter of an agent's start, and agents don't need it.

    found = {}
    for package in BUILDS.get(name, (name,)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed here, by their names."""
    return {name: next(iter(found.values())) for name in packages if (found := builds(name))}
