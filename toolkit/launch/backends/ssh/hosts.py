"""Host names, and how many tasks each gets: "a,b:2"."""

import dataclasses
import re

from toolkit.errors import LaunchError

__all__ = ["Host", "parse"]

_NAME = re.compile(
    r"(?:[\w.+-]+@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<tasks>\d{1,4}))?", re.ASCII
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    Attributes:
        name: As ssh takes it: a name, an alias of the user's configuration, user@name.
        tasks: How many tasks run there.
    """

    name: str
    tasks: int = 1


def parse(text: str) -> tuple[Host, ...]:
    """Reads "a,b:2,me@c": a task on a, two on b, one on c.

    Raises:
        LaunchError: A name is none, or is there twice.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        found = _NAME.fullmatch(part)
        if found is None:
            raise LaunchError(
                asked=f"--hosts={text[:200]}",
                found=f"{part[:60]!r} is no host" if part else "a name in it is empty",
                remedy="Write names as ssh takes them, and after a colon how many tasks: --hosts=a,b:2",
            )
        name = part[: found.start("tasks") - 1] if found["tasks"] else part
        if found["tasks"] and not int(found["tasks"]):
            raise LaunchError(asked=f"--hosts={text[:200]}", found=f"{name} gets no task", remedy="Leave it out")
        if name in {host.name for host in hosts}:
            raise LaunchError(
                asked=f"--hosts={text[:200]}", found=f"{name} is there twice", remedy=f"Write {name}:2 for two tasks"
            )
        hosts.append(Host(name.removeprefix("[").removesuffix("]"), int(found["tasks"] or 1)))
    return tuple(hosts)
