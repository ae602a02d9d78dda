"""The table of changes to Keras and TensorFlow in taken_over.csv, which is checked before training.

WRAPPED has whatever `wrap` replaces for the whole process, ADDED the methods that a class lacks (`add`), ATTACHED those
that objects of our strategies have of their own (`attach`), MEANWHILE what is replaced for the time of one call
(`instead`), and CALLED the private functions that are called. `check` compares all with the Keras and the TensorFlow
that are installed, so that a release that changes one of them ends in a sentence, and never in other numbers.
"""

import csv
import functools
import importlib
import importlib.resources
import inspect
from typing import Any, NamedTuple

from toolkit.errors import RequestError
from toolkit.support.wrapping import TRIED, installed


class Taken(NamedTuple):
    """A function or method of Keras or TensorFlow.

    Attributes:
        place: Its module, a colon, and its name there: "keras.src.models.model:Model.save".
        takes: The names of its parameters, in order. It may have others, if those have defaults.
        why: What is done there, or what it is called for.
        test: The test, under tests/, that fails when it does something else.
        upstream: Of what is replaced for the whole process, the issue of Keras or TensorFlow that would end it, or why
            there is none.
    """

    place: str
    takes: str
    why: str
    test: str
    upstream: str = ""


def _rows(kind: str) -> tuple[Taken, ...]:
    table = importlib.resources.files(__package__).joinpath("taken_over.csv").read_text(encoding="utf-8")
    return tuple(Taken(**row) for row in csv.DictReader(table.splitlines()) if row.pop("kind") == kind)


WRAPPED = _rows("wrapped")
ADDED = _rows("added")
ATTACHED = _rows("attached")
MEANWHILE = _rows("meanwhile")
CALLED = _rows("called")


@functools.cache
def check() -> None:
    """Compares the table with the installed versions. Later calls do nothing.

    Raises:
        RequestError: Something isn't there, or takes other arguments.
    """
    for row in (*WRAPPED, *ATTACHED, *MEANWHILE, *CALLED):
        try:
            function = find(row.place)
        except (ImportError, AttributeError):
            _refuse(row, "that version has none")
        _check_parameters(row, function)


def find(place: str) -> Any:
    """Returns the object at a place of the table."""
    module, _, name = place.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _check_parameters(row: Taken, function: Any) -> None:
    there = list(inspect.signature(function).parameters.values())
    expected = row.takes.split()
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
    _refuse(row, f"its parameters are ({names}), and not ({', '.join(expected)})")


def _optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD


def _refuse(row: Taken, found: str) -> None:
    raise RequestError(
        asked=f"{row.place.partition(':')[2]} of {installed(row.place)} is needed",
        found=found,
        remedy=f"Install a version that this toolkit was tried with: {TRIED}",
    )
