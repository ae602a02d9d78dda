"""One problem of a TF_CONFIG: its place, the finding, and the remedy."""

import dataclasses
from collections.abc import Mapping, Sequence

from toolkit.errors import ClusterError

__all__ = ["Problem", "inside", "refusal", "shown"]

_LISTED = 50
_SHOWN, _PLACE = 60, 200  # The most characters of a value and of a place.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a TF_CONFIG.

    Args:
        place: Where: "cluster.worker[1]", "task.index", or "line 3, column 7".
        found: What is there, as a clause: "the port is missing".
        cure: What to do, as a sentence without its full stop.
    """

    place: str
    found: str
    cure: str

    def __str__(self) -> str:
        return f"{self.place}: {self.found}. {self.cure}."


def inside(place: str, name: object) -> str:
    """Returns the place of a member: cluster.worker, or cluster['no name'] if a name needs quotes."""
    if len(place) > _PLACE:
        place = f"{place[: _PLACE // 2]}...{place[-_PLACE // 2 :]}"
    if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= _SHOWN:
        return f"{place}.{name}" if place else name
    return f"{place}[{shown(name)}]"


def shown(value: object) -> str:
    """Returns a short text for a value: a list may be nested a thousand deep."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "...")
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of many digits"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return repr(value)[:_SHOWN]


def refusal(source: str, problems: Sequence[Problem]) -> ClusterError:
    """Returns one error for all problems, with a line for each."""
    lines = [str(problem) for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"And {len(problems) - _LISTED:,} more; `toolkit tf-config check` lists them all.")
    count = "one mistake" if len(problems) == 1 else f"{len(problems):,} mistakes"
    return ClusterError(
        asked=f"{source} should describe a cluster",
        found=f"it has {count}",
        remedy="\n  ".join(["To correct:", *lines]).removesuffix("."),
    )
