"""An attribute of a JobSpec that is a flag of `toolkit launch`, too: what it means, and where."""

import dataclasses
from typing import Any

__all__ = ["PLACES", "SUPERVISED", "Option", "option"]

PLACES = ("local", "ssh", "slurm", "kubernetes")
SUPERVISED = ("local", "ssh", "slurm")  # Where the toolkit's own launcher watches the tasks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An attribute of a JobSpec, which is a flag of `toolkit launch`, too.

    Attributes:
        name: Of both.
        default: What it is unless it is given.
        kind: "switch", "several" (a flag that may be repeated), or the type of its value.
        text: What it means, in a line.
        group: Under which heading it is listed.
        places: Where it means something.
        metavar: What stands for its value in a list of flags.
    """

    name: str
    default: Any
    kind: Any
    text: str
    group: str
    places: tuple[str, ...]
    metavar: str | None


def option(
    default: Any, text: str, group: str, metavar: str | None = None, *, places: tuple[str, ...] = PLACES, kind: Any = ""
) -> Any:
    """Returns a dataclass's field with all that an Option says of it; `kind` follows from the default unless given."""
    kind = kind or {bool: "switch", tuple: "several"}.get(type(default), type(default))
    told = {"text": text, "group": group, "places": places, "metavar": metavar, "kind": kind}
    return dataclasses.field(default=default, metadata=told)
