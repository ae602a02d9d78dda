"""The table of what is changed or used of Keras's and TensorFlow's insides, which is compared before anything is used.

`table.csv` has a row for each function, class or module. By its kind it is

wrapped     replaced for the whole process (`replaced`)
added       a class is given methods that it lacks
attached    an object of our strategies has its own method (`wrapping.attach`)
meanwhile   replaced for the time of a call (`wrapping.instead`)
called      a private method that is called on an object
imported    taken from a private path, by its name in `private`

`check` compares all of them with the Keras and the TensorFlow that are installed, so that a release that changes one
ends in a sentence, and never in an ImportError or in other numbers.
"""

import csv
import functools
import importlib
import importlib.metadata
import importlib.resources
import inspect
import re
import sys
from typing import Any, NamedTuple

from toolkit.errors import RequestError

TRIED = "Keras 3.12 to 3.16, TensorFlow 2.20 to 2.22"


class Row(NamedTuple):
    """What is changed or used of Keras or TensorFlow.

    Attributes:
        kind: What is done with it: one of the words above.
        place: Its module, a colon, and its name there: "keras.src.models.model:Model.save". A module has no name.
        before: Its place in earlier versions, where that was another.
        takes: The names of its parameters, in order. It may have others, if those have defaults.
        why: What is done there, or what it is used for.
        test: The test, under tests/, that fails when it does something else.
        upstream: Of what is replaced for the whole process, the issue of Keras or TensorFlow that would end it, or why
            there is none.
    """

    kind: str
    place: str
    before: str = ""
    takes: str = ""
    why: str = ""
    test: str = ""
    upstream: str = ""

    @property
    def name(self) -> str:
        """What it is called here: "Model.save", and the last word of a module."""
        module, _, name = self.place.partition(":")
        return name or module.rpartition(".")[2]


def rows(*kinds: str) -> tuple[Row, ...]:
    """Returns the rows of some kinds; all without one."""
    return tuple(each for each in _rows() if not kinds or each.kind in kinds)


@functools.cache
def _rows() -> tuple[Row, ...]:
    lines = importlib.resources.files(__package__).joinpath("table.csv").read_text(encoding="utf-8").splitlines()
    return tuple(Row(**each) for each in csv.DictReader(lines))


@functools.cache
def row(name: str) -> Row:
    """Returns the row of that name."""
    (found,) = (each for each in _rows() if each.name == name)
    return found


@functools.cache
def check() -> None:
    """Compares the table with the installed versions. Later calls do nothing.

    Raises:
        RequestError: Something isn't there, or takes other arguments.
    """
    for each in _rows():
        _check_parameters(each, find(each))


def find(wanted: Row) -> Any:
    """Returns what a row is about.

    Raises:
        RequestError: The installed versions don't have it.
    """
    for place in filter(None, (wanted.place, wanted.before)):
        try:
            return _at(place)
        except (ImportError, AttributeError):
            continue
    raise _refusal(wanted, "that version has none")


def owner_and_name(wanted: Row) -> tuple[Any, str]:
    """Returns the class or the module that has what a row is about, and the name that it has there.

    Raises:
        RequestError: The installed versions don't have it.
    """
    find(wanted)
    for place in filter(None, (wanted.place, wanted.before)):
        owner, separator, name = place.rpartition("." if "." in place.partition(":")[2] else ":")
        try:
            found = _at(owner)
        except (ImportError, AttributeError):
            continue
        if separator and hasattr(found, name):
            return found, name
    raise _refusal(wanted, "it is a module")


def _at(place: str) -> Any:
    module, _, name = place.partition(":")
    return functools.reduce(getattr, name.split(".") if name else (), importlib.import_module(module))


def _check_parameters(wanted: Row, found: Any) -> None:
    if inspect.ismodule(found) or inspect.isclass(found):
        return
    there = list(inspect.signature(found).parameters.values())
    expected = wanted.takes.split()
    for place, parameter in enumerate(there):
        if parameter.kind == parameter.VAR_POSITIONAL:
            return  # It takes any arguments from here on, and so does another library's wrapper around it.
        known = place < len(expected)
        if (known and parameter.name != expected[place]) or not (known or _optional(parameter)):
            break
    else:
        if len(there) >= len(expected):
            return
    names = ", ".join(parameter.name for parameter in there)
    raise _refusal(wanted, f"its parameters are ({names}), and not ({', '.join(expected)})")


def _optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD


def _refusal(wanted: Row, found: str) -> RequestError:
    return RequestError(
        asked=f"{wanted.name} of {_installed(wanted.place)} is needed",
        found=found,
        remedy=f"Install a version that this toolkit was tried with: {TRIED}",
    )


def _installed(place: str) -> str:
    """Returns a place's package with its installed version: "keras 3.15.1"."""
    package = re.split("[.:]", place, maxsplit=1)[0]
    version = getattr(sys.modules.get(package), "__version__", "")  # A nightly build's package has another name.
    return f"{package} {version}".strip()
