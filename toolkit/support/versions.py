"""Which versions of other packages are installed."""

import contextlib
import importlib.metadata
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed here, by their names."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
