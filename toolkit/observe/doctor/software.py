"""Packages that fit together, variables and files that change what a script does, and the data sets that are there."""

import functools
import json
import operator
import os
import pathlib
import platform
import re
import shlex
from collections.abc import Iterator
from importlib import metadata

from toolkit import __version__
from toolkit.cluster import check, discover
from toolkit.data.data_sets import cifar10_directory, cifar10_is_prepared
from toolkit.devices.inventory import resolve
from toolkit.errors import ClusterError, DeviceError
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok, warning
from toolkit.support.versions import BUILDS, builds, versions

_OWN = "tf-strategy-toolkit"
_ASKING = (_OWN, "tensorflow", "keras", "tensorflow-datasets", "tensorboard")
_NAMED = ("tensorflow", "keras", "tensorflow-datasets", "protobuf", "numpy")
_OPTIONAL = (_OWN, "tensorflow-datasets")  # The toolkit may run from its source.


def look_at_versions(_: Situation) -> Iterator[Finding]:
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
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    asked: dict[str, dict[str, SpecifierSet]] = {}
    for name in _ASKING:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                asked.setdefault(name, {})["toolkit"] = SpecifierSet()
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                asked.setdefault(requirement.name, {})[name] = requirement.specifier
    for name, specifiers in asked.items():
        cure = f"pip install '{name}{functools.reduce(operator.and_, specifiers.values())}'"
        found = versions([name]).get(name)
        if found is None:
            needs = "needs" if len(specifiers) == 1 else "need"
            yield failure(name, f"it isn't installed, and {' and '.join(specifiers)} {needs} it", cure)
            continue
        for who, specifier in specifiers.items():
            if not specifier.contains(found, prereleases=True):
                yield failure(name, f"{who} needs {name}{specifier}, and {found} is installed", cure)
                break


def _twice() -> Iterator[Finding]:
    """Two builds of a package write into the same folder."""
    for name in BUILDS:
        first, *others = builds(name) or {name: ""}
        for other in others:
            yield failure(
                other,
                f"{other} {builds(name)[other]} is installed beside {first}, and both write into the same folder",
                f"pip uninstall -y {other} {first} && pip install {first}",
            )


_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_LEGACY = "TF_USE_LEGACY_KERAS"
_MOST_SCRIPTS, _MOST_BYTES = 200, 1 << 20
_DISTRIBUTION = re.compile(r"^[^#\n]*\bkeras\.distribution\b|^\s*from keras import .*\bdistribution\b", re.MULTILINE)


def look_at_environment(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each surprise, or that there is none."""
    parts = (_backend, _variables, _visible, _cluster, _distribution)
    wrong = [finding for part in parts for finding in part(situation)]
    yield from wrong
    if not wrong:
        yield ok("environment", "no environment variable or configuration file changes what a script does")


def _backend(situation: Situation) -> Iterator[Finding]:
    environ = situation.environ
    named = environ.get("KERAS_BACKEND")
    if named:
        if named != "tensorflow":
            yield failure(
                "KERAS_BACKEND",
                f"KERAS_BACKEND={named}, but TensorFlow's strategies work only with the tensorflow backend",
                "unset KERAS_BACKEND",
            )
        return
    file = pathlib.Path(environ.get("KERAS_HOME") or pathlib.Path(environ.get("HOME", "~")) / ".keras", "keras.json")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        yield failure(
            "keras.json",
            f"{file} holds no JSON object, and `import keras` fails",
            f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.bad')}",
        )
        return
    backend = settings.get("backend", "tensorflow")
    if backend != "tensorflow":
        yield failure(
            "keras.json",
            f"{file} sets the backend {backend}, but TensorFlow's strategies work only with tensorflow",
            "export KERAS_BACKEND=tensorflow",
        )


def _visible(situation: Situation) -> Iterator[Finding]:
    value = situation.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    try:
        seen = resolve(value, situation.inventory)
    except DeviceError as error:
        yield failure(
            "CUDA_VISIBLE_DEVICES", f"CUDA_VISIBLE_DEVICES={value}, but {error.found}", "unset CUDA_VISIBLE_DEVICES"
        )
        return
    hidden = len(situation.inventory.gpus) - len(seen)
    if hidden > 0:
        cards = "card is" if hidden == 1 else "cards are"
        yield warning(
            "CUDA_VISIBLE_DEVICES",
            f"CUDA_VISIBLE_DEVICES={value!r}: {hidden} of {len(situation.inventory.gpus)} {cards} hidden",
            "unset CUDA_VISIBLE_DEVICES",
        )


def _variables(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each variable that changes TensorFlow and should be unset."""
    environ, cores = situation.environ, situation.inventory.cores
    wrong = {}
    if environ.get(_LEGACY, "").lower() in ("1", "true"):
        try:
            metadata.version("tf_keras")
            wrong[_LEGACY] = " makes tf.keras Keras 2, and `import keras` can't use its models"
        except metadata.PackageNotFoundError:
            missing = "makes tf.keras the package tf_keras, which isn't installed: every use of tf.keras fails"
            yield failure(_LEGACY, f"{_LEGACY}={environ[_LEGACY]} {missing}", f"unset {_LEGACY}")
    if "TF_FORCE_GPU_ALLOW_GROWTH" in environ:
        wrong["TF_FORCE_GPU_ALLOW_GROWTH"] = " overrides --memory and tf.config"
    for name in _THREADS:
        value = environ.get(name, "").strip()
        if value and (not (value.isascii() and value.isdigit()) or len(value) > 9 or int(value) == 0):
            wrong[name] = " is no number of threads"
        elif value and int(value) < cores:
            wrong[name] = f" is fewer than the {cores} cores: some stay idle"
    for name, why in wrong.items():
        yield warning(name, f"{name}={environ[name]}{why}", f"unset {name}")


def _cluster(situation: Situation) -> Iterator[Finding]:
    text = situation.environ.get("TF_CONFIG")
    if text is not None:
        checked = check(text)
        for problem in checked.problems:
            yield failure("TF_CONFIG", f"{problem.place}: {problem.found}", problem.cure)
        return
    try:
        discover(situation.environ)
    except ClusterError as error:
        yield failure("cluster", error.found, error.remedy)


def _distribution(situation: Situation) -> Iterator[Finding]:
    try:
        scripts = sorted(path for path in situation.here.glob("*.py") if path.is_file())[:_MOST_SCRIPTS]
    except OSError:
        return
    for script in scripts:
        try:
            text = script.read_bytes()[:_MOST_BYTES].decode(errors="replace")
        except OSError:
            continue
        if _DISTRIBUTION.search(text):
            yield warning(
                "keras.distribution",
                f"{script.name} uses keras.distribution, which does nothing on Keras's TensorFlow backend",
                "Make the strategy with toolkit.strategies.create() instead; the README has a script",
            )


def look_at_data(situation: Situation) -> Iterator[Finding]:
    """Yields which data set `--data=auto` uses."""
    named = situation.environ.get("TFDS_DATA_DIR")
    if named and not os.path.isdir(os.path.expanduser(named)):
        yield warning(
            "data", f"TFDS_DATA_DIR={named}, and there is no such directory", f"mkdir -p {shlex.quote(named)}"
        )
        return
    directory = cifar10_directory()
    if cifar10_is_prepared(directory):
        yield ok("data", f"CIFAR-10 is prepared in {directory}")
    else:
        yield ok("data", f"no CIFAR-10 in {directory}: --data=auto takes the embedded data set")
