"""The membership of a process started by mpirun.

The variables are those that Open MPI defines in every process
(https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html). None of them names the other
hosts, so for more than one host the user does, in TOOLKIT_HOSTS.
"""

import collections
import itertools
import zlib
from collections.abc import Iterator, Mapping

from toolkit.cluster.sources import ranks
from toolkit.cluster.spec import Membership
from toolkit.errors import ClusterError

__all__ = ["membership", "place_on_host"]


def membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads mpirun's variables: every rank is a worker, unless TOOLKIT_TASKS says otherwise.

    Returns:
        None where mpirun didn't start this process, or started it alone.

    Raises:
        ClusterError: There are several hosts and TOOLKIT_HOSTS doesn't name them, or what it names
            isn't where the ranks are.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = ranks.whole(environ, "OMPI_COMM_WORLD_SIZE", launcher="Open MPI", most=ranks.MOST)
    if size < 2:
        return None
    rank = _number(environ, "RANK")
    local_rank, local_size = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_SIZE")
    if rank >= size or local_rank >= local_size:
        raise ClusterError(
            asked=f"Open MPI started {size} ranks, {local_size} of them here",
            found=f"this is rank {rank} of all and {local_rank} here",
            remedy="Leave Open MPI's variables as mpirun sets them, or set TF_CONFIG instead",
        )
    given = environ.get("TOOLKIT_HOSTS", "").strip()
    if given:
        places = _places(given, size)
        _check(given, places, rank=rank, local=(local_rank, local_size))
        hosts = [host for host, _ in places]
    elif local_size == size:
        hosts = ["127.0.0.1"] * size
    else:
        raise ClusterError(
            asked=f"mpirun started {size} ranks, {local_size} of them on this host",
            found="Open MPI tells a rank nothing of the other hosts",
            remedy="Name them in rank order, with their slots: mpirun -x TOOLKIT_HOSTS=a:2,b:2 ...",
        )
    # All ranks of a job have the same namespace, and other jobs on this host have other ones.
    job = zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode(errors="replace"))
    return ranks.membership(environ, hosts, job=job, rank=rank, source=f"Open MPI, {size} ranks")


def place_on_host(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns this rank's number among mpirun's ranks on its host, and their count; None outside of mpirun."""
    if not all(f"OMPI_COMM_WORLD_{name}" in environ for name in ("LOCAL_RANK", "LOCAL_SIZE")):
        return None
    return _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_SIZE")


def _number(environ: Mapping[str, str], name: str) -> int:
    return ranks.whole(environ, f"OMPI_COMM_WORLD_{name}", launcher="Open MPI")


def _places(given: str, size: int) -> list[tuple[str, int]]:
    """Reads "a:2,b" as each rank's host and its place there: [("a", 0), ("a", 1), ("b", 0)]."""
    named: list[tuple[str, int]] = []
    for entry in given.split(","):
        text = entry.strip()
        # Brackets around an IPv6 address: [fd00::1]:2
        end = text.rfind("]") + 1
        name, colon, slots = text[end:].partition(":")
        host = (text[:end] + name).removeprefix("[").removesuffix("]")
        if not host or (colon and not (slots.isascii() and slots.isdigit() and 0 < len(slots) < 6)):
            raise ClusterError(
                asked=f"TOOLKIT_HOSTS={given[:60]!r} names hosts and their slots",
                found=f"{text[:60]!r} is neither a host nor a host with a number",
                remedy="Write it as a:2,b:2, in rank order",
            )
        named.append((host, int(slots or 1)))
    total = sum(slots for _, slots in named)
    if total != size:
        raise ClusterError(
            asked=f"TOOLKIT_HOSTS={given[:60]!r} names {total} slots",
            found=f"mpirun started {size} ranks",
            remedy="Name every host with as many slots as it has ranks, in rank order: a:2,b:2",
        )
    places: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [(host, next(places[host])) for host, slots in named for _ in range(slots)]


def _check(given: str, places: list[tuple[str, int]], *, rank: int, local: tuple[int, int]) -> None:
    host, place = places[rank]
    named = sum(each == host for each, _ in places)
    if (place, named) != local:
        raise ClusterError(
            asked=f"TOOLKIT_HOSTS={given[:60]!r} makes rank {rank} number {place} of {named} on {host}",
            found=f"it is number {local[0]} of {local[1]} on its host",
            remedy="Name the hosts as mpirun filled them, in rank order; mpirun --map-by slot fills one after another",
        )
