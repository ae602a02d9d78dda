"""The machines of a job, as the user names them."""

import dataclasses
import re

from toolkit.errors import LaunchError
from toolkit.launch.job.checks import require

__all__ = ["Host", "parse_hosts", "read_hosts"]

_HOST = re.compile(
    r"(?:[\w.+-]+@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<tasks>\d{1,4}))?", re.ASCII
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine on which a job's tasks run.

    Attributes:
        name: What ssh takes: a name, an alias of the user's configuration, user@name; or a node of Slurm's.
        tasks: How many tasks run there.
    """

    name: str
    tasks: int = 1


def read_hosts(path: str) -> list[str]:
    """Reads a file with one host on each line, in Open MPI's format "b slots=2", or as "b:2", for two tasks on b.

    Raises:
        LaunchError: It can't be read, or names none.
    """
    asked = f"--on=ssh:@{path[:200]}"
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except (OSError, ValueError) as error:
        found = f"that file can't be read ({getattr(error, 'strerror', None) or error})"
        raise LaunchError(asked=asked, found=found, remedy="Check its path") from None
    names = []
    for name, *more in filter(None, lines):
        slots = [word.partition("=")[2] for word in more if word.startswith("slots=")]
        names.append(f"{name}:{slots[0]}" if slots else name)
    require(bool(names), asked, "that file names no host", "Write one on each line")
    return names


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads "a,b:2,me@c": one task on a, two on b, one on c.

    Raises:
        LaunchError: A name is none, or is listed twice.
    """
    asked = f"--on=ssh:{text[:200]}"
    hosts: list[Host] = []
    for entry in text.split(","):
        found = _HOST.fullmatch(entry)
        if found is None:
            raise LaunchError(
                asked=asked,
                found=f"{entry[:60]!r} is no host" if entry else "a name in it is empty",
                remedy="Write names as ssh takes them, and after a colon how many tasks: --on=ssh:a,b:2",
            )
        name = entry[: found.start("tasks") - 1] if found["tasks"] else entry
        require(not found["tasks"] or int(found["tasks"]) > 0, asked, f"{name} gets no task", "Leave it out")
        name = name.replace("[", "").replace("]", "")
        require(name not in {h.name for h in hosts}, asked, f"{name} is listed twice", f"Write {name}:2 for two tasks")
        hosts.append(Host(name, int(found["tasks"] or 1)))
    return tuple(hosts)
