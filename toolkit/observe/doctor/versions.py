"""Compares the installed packages with the versions that they require of one another."""

import platform
from collections.abc import Iterator
from importlib import metadata

from toolkit import __version__
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok
from toolkit.support.wrapping import versions

__all__ = ["look"]

_OWN = "tf-strategy-toolkit"
_ASKING = (_OWN, "tensorflow", "keras", "tensorflow-datasets", "tensorboard")
_NAMED = ("tensorflow", "keras", "tensorflow-datasets", "protobuf", "numpy")
_OPTIONAL = (_OWN, "tensorflow-datasets")  # The toolkit may run from its source.
_OTHER_BUILDS = ("tensorflow-cpu", "tf-nightly", "tensorflow-intel", "tf-keras-nightly")


def look(_: Situation) -> Iterator[Finding]:
    """Yields a finding for each package that doesn't fit, or one for all of them."""
    wrong = [*_python(), *_packages(), *_twice()]
    yield from wrong
    if not wrong:
        found = ", ".join(f"{name} {version}" for name, version in versions(_NAMED).items())
        yield ok("versions", f"Python {platform.python_version()}, {found}, toolkit {__version__} fit together")


def _python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    for name in _ASKING:
        try:
            asked = str(metadata.metadata(name).json.get("requires_python", ""))
        except metadata.PackageNotFoundError:
            continue
        if asked and platform.python_version() not in SpecifierSet(asked, prereleases=True):
            yield failure(
                "Python",
                f"{name} needs Python {asked}, and this is {platform.python_version()}",
                "python3.12 -m venv .venv && .venv/bin/pip install .",
            )


def _packages() -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    asked: dict[str, dict[str, SpecifierSet]] = {}
    for name in _ASKING:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                asked.setdefault(name, {})["toolkit"] = SpecifierSet()
            continue
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                asked.setdefault(requirement.name, {})[name] = requirement.specifier
    for name, specifiers in asked.items():
        together = SpecifierSet()
        for specifier in specifiers.values():
            together &= specifier
        cure = f"pip install '{name}{together}'"
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            needs = "needs" if len(specifiers) == 1 else "need"
            yield failure(name, f"it isn't installed, and {' and '.join(specifiers)} {needs} it", cure)
            continue
        for who, specifier in specifiers.items():
            if not specifier.contains(found, prereleases=True):
                yield failure(name, f"{who} needs {name}{specifier}, and {found} is installed", cure)
                break


def _twice() -> Iterator[Finding]:
    """Two builds of TensorFlow write into the same folder."""
    for name in _OTHER_BUILDS:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        yield failure(
            name,
            f"{name} {found} is installed beside tensorflow, and both write into the same folder",
            f"pip uninstall -y {name} tensorflow && pip install tensorflow",
        )
