"""Expands Slurm's compressed lists.

The forms are those of the srun manual and of `scontrol show hostnames`: "n[0-3,7],gpu-a" and "2(x3),1".
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from toolkit.errors import ClusterError

__all__ = ["expand", "expand_counts"]

_MOST = 100_000
_LONGEST = 255  # The most characters of a host's name in DNS.
_ENTRY = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand(hosts: str) -> tuple[str, ...]:
    """Expands "n[08-10],gpu-a" to ("n08", "n09", "n10", "gpu-a").

    Raises:
        ClusterError: It is no such list, or has more than 100,000 hosts, or names that no host can have.
    """
    found: list[str] = []
    position = 0
    while position < len(hosts) or not found:
        entry = _ENTRY.match(hosts, position)
        if not entry or (entry.end() < len(hosts) and hosts[entry.end()] != ","):
            raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
        for host in _hosts(entry[0], hosts):
            found.append(host)
            if len(found) > _MOST:
                raise _refusal(hosts, f"a list of at most {_MOST:,} hosts")
        position = entry.end() + 1
    if hosts.endswith(","):
        raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
    return tuple(found)


def expand_counts(counts: str) -> tuple[int, ...]:
    """Expands "2(x3),1" to (2, 2, 2, 1).

    Raises:
        ClusterError: It is no such list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = _COUNT.fullmatch(part)
        if not match or len(found) + int(match[2] or 1) > _MOST:
            raise _refusal(counts, "a list of counts such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _hosts(entry: str, hosts: str) -> Iterator[str]:
    """Yields one entry's hosts; the last bracket counts fastest, as in r[1-2]n[0-3]."""
    pieces: list[Sequence[str]] = []
    length = 0
    for match in _PIECE.finditer(entry):
        ranges = [] if match[1] is None else list(_ranges(match[1], hosts))
        length += len(match[2] or "") + max((width for _, width in ranges), default=0)
        # Checked before the expansion: a few characters can stand for more than fits into memory.
        if math.prod(map(len, pieces)) * sum(len(each) for each, _ in ranges) > _MOST:
            raise _refusal(hosts, f"a list of at most {_MOST:,} hosts")
        if length > _LONGEST:
            raise _refusal(hosts, f"hosts with names of at most {_LONGEST} letters")
        pieces.append([f"{n:0{width}d}" for each, width in ranges for n in each] if ranges else (match[2],))
    for names in itertools.product(*pieces):
        yield "".join(names)


def _ranges(text: str, hosts: str) -> Iterator[tuple[range, int]]:
    """Yields the numbers in a bracket and their smallest number of digits."""
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
        yield range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])


def _refusal(value: str, wanted: str) -> ClusterError:
    return ClusterError(
        asked=f"Slurm gives {wanted}",
        found=f"this is {value[:60]!r}",
        remedy="Leave Slurm's variables as srun sets them, or set TF_CONFIG instead",
    )
