"""A job, described once: what runs, how often, on which machines and how.

Each attribute of a JobSpec is a flag of `toolkit launch`, too: an Option. The rules for values are here or in `checks`.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.errors import LaunchError
from toolkit.launch import checks, queues
from toolkit.launch.checks import require
from toolkit.support import status

QUEUES = queues.names()
PLACES = ("local", "ssh", *QUEUES, "kubernetes")
SUPERVISED = ("local", "ssh", *QUEUES)  # The places where the toolkit's own launcher watches the tasks.
_HOST = re.compile(
    r"(?:[\w.+-]+@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<tasks>\d{1,4}))?", re.ASCII
)


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

    def check(self, value: Any, place: str) -> None:
        """Checks that a value applies at a place, and that a number is within its bounds.

        Raises:
            LaunchError: It doesn't apply there, is too small, too large, or no number.
        """
        if place not in self.places:
            where = f"it applies only with --on={' or '.join(self.places)}"
            raise LaunchError(asked=f"--{self.name}", found=where, remedy="Leave it out")
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


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine on which a job's tasks run.

    Attributes:
        name: What ssh takes: a name, an alias of the user's configuration, user@name; or a queue's node.
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


def spread(tasks: int, hosts: int) -> list[int]:
    """Returns how many tasks run on each host: an equal number, and one more on the first hosts."""
    return [tasks // hosts + (number < tasks % hosts) for number in range(hosts)]


_tasks = functools.partial(option, group="how many tasks")
_where, _anywhere = functools.partial(option, group="where"), functools.partial(option, group="more")
_shown = functools.partial(option, group="what is shown", places=SUPERVISED)
_more, _local = functools.partial(_anywhere, places=SUPERVISED), functools.partial(_anywhere, places=("local",))
_cluster = functools.partial(option, group="queue", places=(*QUEUES, "kubernetes"))
_queue = functools.partial(option, group="queue", places=QUEUES)
_ssh, _kubernetes = (functools.partial(option, group=place, places=(place,)) for place in ("ssh", "kubernetes"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: a command, how many tasks run it, where, and how they are watched.

    Every attribute but `command` is a flag of `toolkit launch` under the same name, and `options()` says what it means.
    Times are seconds. `command` is ("train.py", "--flag") or ("-m", "recipes.cifar_multi_worker", "--flag").

    Raises:
        LaunchError: A value is out of its range, or doesn't apply at the place that `on` names.
    """

    command: tuple[str, ...]

    workers: int | None = _tasks(None, "workers [one for each GPU, or one]", "N", kind=int, least=0)
    chief: bool = _tasks(False, "start a chief as well as the workers")
    ps: int = _tasks(0, "parameter servers; --chief as well", "N", least=0)
    evaluator: bool = _tasks(False, "an evaluator")
    on: str = _where(
        "local",
        f"local (this machine), ssh:a,b:2 (two tasks on b), ssh:@FILE, {', '.join(QUEUES)} or kubernetes [local]",
        "PLACE",
    )
    env: tuple[str, ...] = _where((), "set this variable for the tasks; may be repeated", "NAME[=VALUE]")
    log_dir: str | None = _shown(None, "the job creates a directory for its logs in this one [runs]", "DIR")
    show: tuple[str, ...] = _shown(
        (), "show this task's lines here, all or none [the chief's, or the first worker's]; may be repeated", "TASK"
    )
    native_logs: bool = _shown(False, "show TensorFlow's start-up messages too; the log files always have them")
    prefix: str = _more("", "a command before each task's, such as 'numactl --cpunodebind=0'", "CMD")
    snapshot: bool = option(
        False,
        "run a copy of the script's folder, as it is now: for jobs that wait in a queue or start again",
        group="more",
        places=("local", *QUEUES),
    )
    max_restarts: int = option(
        0,
        "restart a failed job from its checkpoint, at most N times in a row without progress [0]",
        "N",
        group="how they run",
        least=0,
    )
    max_total_restarts: int | None = option(
        None, "at most N restarts, with progress or without [any number]", "N", kind=int, group="how they run", least=0
    )
    start_timeout: float = _anywhere(
        300.0, "seconds for which tasks wait for each other at the start [300]", "S", least=0
    )
    heartbeat_timeout: float = _anywhere(
        status.SECONDS_OF_SILENCE,
        "treat a task as lost after S seconds without a heartbeat, or suspended by a signal such as SIGSTOP "
        f"[{status.SECONDS_OF_SILENCE:g}]",
        "S",
        least=1,
        most=3600,
    )
    stall_timeout: float | None = _more(
        None,
        "end the job after S seconds without progress; 0: never [five times the longest step so far, or 1800]",
        "S",
        kind=float,
        least=0,
    )
    stall_floor: float = _more(90.0, "the shortest limit without progress that is learnt from steps [90]", "S", least=1)
    grace: float = _more(15.0, "seconds for tasks to end before they are killed [15]; after a failure 5", "S", least=0)
    preempt_when: str = _more(
        "", "a command on each host, asked every 5 s; when it exits with 0, tasks save a checkpoint and end", "CMD"
    )
    as_is: bool = _more(False, "don't replace TensorFlow's strategies in a script with the toolkit's")
    open_network: bool = option(
        False,
        "allow public addresses; use it only if a firewall guards the ports",
        group="more",
        places=("local", "ssh"),
    )
    cluster: str | None = _local(None, "start this machine's tasks of a tf_configs/ file", "FILE")
    task: tuple[str, ...] = _local((), "with --cluster: start just this one, such as worker:0; may be repeated", "TASK")
    nodes: int = option(
        1,
        "number of hosts (--rendezvous), or of a queue's nodes [1]",
        "N",
        group="where",
        places=("local", *QUEUES),
        least=1,
    )
    rendezvous: str | None = option(
        None, "where hosts meet; run the same command on each", "HOST:PORT", group="where", places=("local",)
    )
    host: str = _local("127.0.0.1", "address at which tasks here reach one another [127.0.0.1]", "ADDRESS")
    directory: str | None = _ssh(None, "where tasks run on each host [this directory's path]", "DIR")
    copy_to: str | None = _ssh(None, "copy this directory there by rsync first, and run in the copy", "DIR")
    python: str | None = option(
        None,
        "Python interpreter on each host [the path of this one]; for Kubernetes in the image [python]",
        "PATH",
        group="ssh",
        places=("ssh", "kubernetes"),
    )
    ssh_config: str | None = _ssh(None, "for ssh -F [the user's own]", "FILE")
    min_workers: int = _ssh(0, "continue with N or more workers when hosts are lost [all]", "N", least=0)
    tasks_per_node: int | None = _queue(None, "tasks on each node [one for each GPU asked for]", "N", kind=int, least=1)
    gpus_per_node: int = _queue(
        0, "GPUs of each node; one task for each, unless --tasks_per_node is given [0]", "N", least=0
    )
    gpus_per_task: int = _cluster(0, "GPUs of each task that trains [0]", "N", least=0)
    cpus_per_task: str | None = _cluster(None, "cores of each task [its GPUs' share of a node, or one]", "N")
    time: str | None = _queue(
        None, "time limit, such as 60 (minutes), 8:00:00 or 1-12 (1 day 12 hours) [the partition's]", "TIME"
    )
    notice: int = _queue(120, "tell tasks S seconds before the time limit to write a checkpoint [120]", "S", least=1)
    partition: str | None = _queue(None, "partition to submit to [the site's default]", "NAME")
    account: str | None = _queue(None, "account to charge [your default]", "NAME")
    setup: tuple[str, ...] = _queue((), "a line before the job: 'module load cuda'; may be repeated", "LINE")
    submit: tuple[str, ...] = _queue(
        (),
        "another option of the program that submits; its name works, too (--sbatch=exclusive), and so do many options "
        "(--qos=long, --mem=64G)",
        "NAME[=VALUE]",
    )
    name: str = _cluster("toolkit", "the job's name [toolkit]", "NAME")
    image: str | None = _kubernetes(None, "container image with this toolkit in it", "IMAGE")
    namespace: str | None = _kubernetes(None, "namespace of the objects [kubectl's]", "NAME")
    memory: str | None = _kubernetes(None, "memory of each task, such as 8Gi", "SIZE")
    volume: tuple[str, ...] = _kubernetes((), "mount a volume claim in every task; may be repeated", "CLAIM:/PATH")
    port: int = _kubernetes(2222, "port at which tasks reach one another [2222]", "PORT", least=1024, most=65535)
    user: int = _kubernetes(1000, "user id that the container runs as, never 0 [1000]", "UID", least=1)
    patch: str | None = _kubernetes(None, "YAML to merge into the job, for your site's settings", "FILE")

    def __post_init__(self) -> None:
        for each in options():
            object.__setattr__(self, each.name, each.typed(getattr(self, each.name)))
        if self.on.startswith("ssh:@"):  # Read once, here, because a launcher in its own session may see another file.
            object.__setattr__(self, "on", f"ssh:{','.join(read_hosts(self.on.removeprefix('ssh:@')))}")
        require(self.place in PLACES, f"--on={self.on[:80]}", "there is no such place", f"Choose {', '.join(PLACES)}")
        colon = self.place != self.on
        require(
            not colon or self.place == "ssh", f"--on={self.on[:80]}", "only ssh takes hosts", f"Write --on={self.place}"
        )
        for each in options():
            if (value := getattr(self, each.name)) != each.default:
                each.check(value, self.place)
        if self.ps and self.workers and not self.chief:
            object.__setattr__(self, "chief", True)  # Without one, nobody would schedule the workers' steps.
        checks.job(self)
        if self.queued:
            queues.find(self.place).check(self)

    @property
    def place(self) -> str:
        """Where the tasks run, without hosts: one of PLACES, or another text that was given."""
        return self.on.partition(":")[0]

    @property
    def queued(self) -> bool:
        """Whether it is submitted to a queue."""
        return self.place in QUEUES

    @property
    def rooms(self) -> list[int]:
        """How many tasks run on each of a queue's nodes: an equal number, and one more on the first nodes."""
        each = self.tasks_per_node or self.gpus_per_node // (self.gpus_per_task or 1) or 1
        return spread(sum(number for _, number in self.counts) or self.nodes * each, self.nodes)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of `--on=ssh`; () at other places.

        Raises:
            LaunchError: There are none, a name is none, or is listed twice.
        """
        return parse_hosts(self.on.partition(":")[2]) if self.place == "ssh" else ()

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """The numbers of tasks of each kind that were asked for, without zeros; () if none were given."""
        every = (("chief", int(self.chief)), ("worker", self.workers or 0), ("ps", self.ps))
        return tuple((job, n) for job, n in (*every, ("evaluator", int(self.evaluator))) if n)

    @property
    def texts(self) -> list[str]:
        """The texts among its values, those in lists included."""
        values = [getattr(self, each.name) for each in options()]
        return [t for v in values for t in (v if isinstance(v, tuple) else (v,)) if isinstance(t, str)]

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a launcher and an agent count each other as lost."""
        return max(5.0, self.heartbeat_timeout)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of `env`."""
        return dict(pair.partition("=")[::2] for pair in self.env)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `toolkit` that describe this job."""
        given = []
        for each in options():
            value = getattr(self, each.name)
            if value == each.default:
                continue
            if each.kind == "switch":
                given.append(f"--{each.name}" if value else f"--no-{each.name}")
            else:
                given += [f"--{each.name}={one}" for one in (value if isinstance(value, tuple) else (value,))]
        return ["launch", *given, *(() if self.command[0] == "-m" else ("--",)), *self.command]


@functools.cache
def options() -> tuple[Option, ...]:
    """Returns the attributes of a JobSpec that are flags."""
    fields = [field for field in dataclasses.fields(JobSpec) if field.metadata]
    return tuple(Option(name=field.name, default=field.default, **field.metadata) for field in fields)
