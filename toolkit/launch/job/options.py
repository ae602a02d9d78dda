"""Describes attributes of a JobSpec that are also flags of `toolkit launch`: their meaning and their places."""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.errors import LaunchError

__all__ = ["PLACES", "SUPERVISED", "Option", "option"]

PLACES = ("local", "ssh", "slurm", "kubernetes")
SUPERVISED = ("local", "ssh", "slurm")  # The places where the toolkit's own launcher watches the tasks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An attribute of a JobSpec that is also a flag of `toolkit launch`.

    Attributes:
        name: Of both.
        default: What it is unless it is given.
        kind: "switch", "several" (a flag that may be repeated), or the type of its value.
        text: What it means, in a line.
        group: Under which heading it is listed.
        places: Where it means something.
        metavar: What stands for its value in a list of flags.
        least: The smallest number that it may be; None for any.
        most: The largest.
    """

    name: str
    default: Any
    kind: Any
    text: str
    group: str
    places: tuple[str, ...] = PLACES
    metavar: str | None
    least: float | None = None
    most: float | None = None

    def typed(self, value: Any) -> Any:
        """Converts a value given in Python to the attribute's type: a path to a text, a list or dict to a tuple.

        Raises:
            LaunchError: It is of a type that means nothing here.
        """
        if value is None and self.default is None:
            return None
        if self.kind == "several":
            if isinstance(value, Mapping):
                value = [f"{name}={each}" for name, each in value.items()]
            if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
                return tuple(os.fspath(each) if isinstance(each, os.PathLike) else str(each) for each in value)
            raise self._wrong(value, "a list of texts" + ", or a dict" * (self.name == "env"))
        if self.kind == "switch":
            wanted: type | tuple[type, ...] = bool
        else:
            wanted = (int, float) if self.kind is float else self.kind
        if self.kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind != "switch"):
            words = {"switch": "True or False", int: "a whole number", float: "a number", str: "a text"}
            raise self._wrong(value, words[self.kind])
        return value

    def check_bounds(self, value: Any) -> None:
        """Checks that a number is within its bounds.

        Raises:
            LaunchError: It is too small, too large, or no number.
        """
        most = math.inf if self.most is None else self.most
        if self.least is not None and value is not None and not self.least <= value <= most:
            unit = " seconds" if self.metavar == "S" else ""
            bounds = f"{self.least:g}{unit} or more" if self.most is None else f"{self.least:g} to {self.most:g}{unit}"
            raise LaunchError(asked=f"--{self.name}={value}", found=f"it must be {bounds}", remedy=f"Give {bounds}")

    def _wrong(self, value: Any, wanted: str) -> LaunchError:
        return LaunchError(
            asked=f"{self.name}={value!r:.80}", found=f"that is a {type(value).__name__}", remedy=f"Give {wanted}"
        )


def option(default: Any, text: str, metavar: str | None = None, *, kind: Any = "", **facts: Any) -> Any:
    """Returns a dataclass's field that holds an Option; `kind` follows from the default unless given."""
    kind = kind or {bool: "switch", tuple: "several"}.get(type(default), str if default is None else type(default))
    metadata = {"text": text, "metavar": metavar, "kind": kind, **facts}
    return dataclasses.field(default=default, metadata=metadata)
