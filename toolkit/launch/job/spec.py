"""A job: what runs, how often, where and how; every check of a value is here or in `checks`, once, for every place."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from toolkit.errors import LaunchError
from toolkit.launch.job import checks, site_checks
from toolkit.launch.job.checks import require
from toolkit.launch.job.hosts import Host, parse_hosts
from toolkit.launch.job.options import PLACES, SUPERVISED, Option, option
from toolkit.support import status

__all__ = ["JobSpec", "options"]

_KINDS = ("job", "jobset", "tfjob")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: a command, how many tasks run it, where, and how they are watched.

    Every attribute but `command` is a flag of `toolkit launch` under the same name, and `options()` says what it means.
    Times are seconds. `command` is ("train.py", "--flag") or ("-m", "recipes.cifar_multi_worker", "--flag").

    Raises:
        LaunchError: A value is out of its range, or doesn't apply at the place that `on` names.
    """

    command: tuple[str, ...]

    workers: int | None = option(None, "workers [one for each GPU, or one]", "how many tasks", "N", kind=int)
    chief: bool = option(False, "a chief of its own, beside the workers", "how many tasks")
    ps: int = option(0, "parameter servers", "how many tasks", "N")
    evaluator: bool = option(False, "an evaluator", "how many tasks")

    on: str = option(
        "local", "local (this machine), ssh:a,b:2 (two tasks on b), slurm or kubernetes [local]", "where", "PLACE"
    )
    env: tuple[str, ...] = option((), "set this variable for the tasks; may be repeated", "where", "NAME[=VALUE]")
    isolate: str = option(
        "no",
        "block others' connections to the tasks; =fully: the tasks' to others too",
        "where",
        "fully",
        places=("local",),
    )

    log_dir: str | None = option(
        None, "a log file per task [runs/launch-TIME]", "what is shown", "DIR", places=SUPERVISED, kind=str
    )
    only: tuple[str, ...] = option(
        (), "show this task's lines only; may be repeated", "what is shown", "TASK", places=SUPERVISED
    )
    tee: bool = option(True, "show the tasks' lines here too", "what is shown", places=SUPERVISED)
    native_logs: bool = option(
        False, "show TensorFlow's own start-up notes too, which the logs have", "what is shown", places=SUPERVISED
    )

    max_restarts: int = option(
        0, "restart a failed job from its checkpoint, at most N times within --restart_window [0]", "how they run", "N"
    )
    restart_window: float = option(
        3600.0, "seconds after which a failure is forgiven [3600]", "more", "S", places=SUPERVISED
    )
    start_timeout: float = option(300.0, "seconds to wait for one another [300]", "more", "S")
    heartbeat_timeout: float = option(
        status.SECONDS_OF_SILENCE,
        f"treat a task as lost after this many seconds without a heartbeat, or stopped by a signal "
        f"[{status.SECONDS_OF_SILENCE:g}]",
        "more",
        "S",
    )
    stall_timeout: float = option(
        1800.0, "end the job after so many seconds without progress; 0: never [1800]", "more", "S", places=SUPERVISED
    )
    grace: float = option(
        15.0, "seconds for tasks to end before they are killed [15]; after a failure 5", "more", "S", places=SUPERVISED
    )
    as_is: bool = option(
        False, "don't replace TensorFlow's strategies by the toolkit's in a script", "more", places=SUPERVISED
    )
    open_network: bool = option(
        False, "allow public addresses; use it only if a firewall guards the ports", "more", places=("local", "ssh")
    )
    cluster: str | None = option(
        None, "start this machine's tasks of a tf_configs/ file", "more", "FILE", places=("local",), kind=str
    )
    task: tuple[str, ...] = option(
        (), "with --cluster: start just this one, such as worker:0; may be repeated", "more", "TASK", places=("local",)
    )
    nodes: int = option(1, "hosts of a rendezvous, or nodes of Slurm's [1]", "where", "N", places=("local", "slurm"))
    rendezvous: str | None = option(
        None, "where hosts meet; run the same command on each", "where", "HOST:PORT", places=("local",), kind=str
    )
    host: str = option(
        "127.0.0.1", "address at which tasks here reach one another [127.0.0.1]", "more", "ADDRESS", places=("local",)
    )

    directory: str | None = option(
        None, "where tasks run on each host [this directory's path]", "ssh", "DIR", places=("ssh",), kind=str
    )
    copy_to: str | None = option(
        None, "copy this directory there by rsync first, and run in the copy", "ssh", "DIR", places=("ssh",), kind=str
    )
    python: str | None = option(
        None,
        "Python interpreter on each host [this one's path] or in the image [python]",
        "ssh",
        "PATH",
        places=("ssh", "kubernetes"),
        kind=str,
    )
    ssh_config: str | None = option(None, "for ssh -F [the user's own]", "ssh", "FILE", places=("ssh",), kind=str)
    min_workers: int = option(
        0, "continue with N or more workers when hosts are lost [all]", "ssh", "N", places=("ssh",)
    )

    tasks_per_node: int | None = option(
        None, "tasks on each [as many as the jobs need]", "slurm", "N", places=("slurm",), kind=int
    )
    gpus_per_task: int = option(0, "GPUs of each task that trains [0]", "slurm", "N", places=("slurm", "kubernetes"))
    cpus_per_task: str | None = option(
        None, "cores of each task [the site's default]", "slurm", "N", places=("slurm", "kubernetes"), kind=str
    )
    time: str | None = option(
        None,
        "time limit in sbatch's form, such as 60 (minutes) or 1-12 (1 day 12 hours) [the partition's]",
        "slurm",
        "TIME",
        places=("slurm",),
        kind=str,
    )
    notice: int = option(
        120, "seconds before the limit in which tasks write a checkpoint [120]", "slurm", "S", places=("slurm",)
    )
    partition: str | None = option(
        None, "partition to submit to [the site's default]", "slurm", "NAME", places=("slurm",), kind=str
    )
    account: str | None = option(None, "account to charge [your default]", "slurm", "NAME", places=("slurm",), kind=str)
    sbatch: tuple[str, ...] = option(
        (), "another option for sbatch, such as qos=long; may be repeated", "slurm", "NAME[=VALUE]", places=("slurm",)
    )
    name: str = option("toolkit", "the job's name [toolkit]", "slurm", "NAME", places=("slurm", "kubernetes"))

    kind: str = option(
        "job", "job (an Indexed Job), jobset or tfjob [job]", "kubernetes", "KIND", places=("kubernetes",)
    )
    image: str | None = option(
        None, "container image with this toolkit in it", "kubernetes", "IMAGE", places=("kubernetes",), kind=str
    )
    namespace: str | None = option(
        None, "namespace of the objects [kubectl's]", "kubernetes", "NAME", places=("kubernetes",), kind=str
    )
    memory: str | None = option(
        None, "memory of each task, such as 8Gi", "kubernetes", "SIZE", places=("kubernetes",), kind=str
    )
    volume: tuple[str, ...] = option(
        (), "mount a volume claim in every task; may be repeated", "kubernetes", "CLAIM:/PATH", places=("kubernetes",)
    )
    port: int = option(
        2222, "port at which tasks reach one another [2222]", "kubernetes", "PORT", places=("kubernetes",)
    )
    user: int = option(
        1000, "user id that the container runs as, never 0 [1000]", "kubernetes", "UID", places=("kubernetes",)
    )
    patch: str | None = option(
        None,
        "YAML to merge into the job, for your site's settings",
        "kubernetes",
        "FILE",
        places=("kubernetes",),
        kind=str,
    )

    def __post_init__(self) -> None:
        require(self.place in PLACES, f"--on={self.on[:80]}", "there is no such place", f"Choose {', '.join(PLACES)}")
        colon = self.place != self.on
        require(
            not colon or self.place == "ssh", f"--on={self.on[:80]}", "only ssh takes hosts", f"Write --on={self.place}"
        )
        self._check_meanings()
        checks.command(self.command)
        checks.counts(self.counts)
        self._check_numbers()
        checks.choice("isolate", self.isolate, ("no", "yes", "fully"))
        checks.choice("kind", self.kind, _KINDS)
        if self.rendezvous is not None:
            checks.address("rendezvous", self.rendezvous)
        for pair in self.env:
            checks.variable(pair)
        for name in (*self.only, *self.task):
            checks.task(name)
        checks.passable([text for _, text in self._texts()])
        site_checks.slurm_names(name=self.name, partition=self.partition, account=self.account)
        site_checks.sbatch(self.sbatch)
        if self.time is not None:
            site_checks.slurm_time(self.time, notice=self.notice)
        checks.tasks(self)

    def _check_meanings(self) -> None:
        for each in options():
            if getattr(self, each.name) != each.default and self.place not in each.places:
                raise LaunchError(
                    asked=f"--{each.name}",
                    found=f"it applies only with --on={' or '.join(each.places)}",
                    remedy="Leave it out",
                )

    def _check_numbers(self) -> None:
        least = {"nodes": 1, "tasks_per_node": 1, "notice": 1, "gpus_per_task": 0, "max_restarts": 0, "min_workers": 0}
        for name, number in least.items():
            checks.at_least(name, getattr(self, name), number)
        checks.within("port", self.port, 1024, 65535)
        checks.at_least("user", self.user, 1)
        for name in ("start_timeout", "stall_timeout", "grace", "restart_window"):
            checks.duration(name, getattr(self, name))
        checks.heartbeat(self.heartbeat_timeout)
        if self.cpus_per_task is not None:
            site_checks.cores(self.cpus_per_task, whole=self.place == "slurm")

    def _texts(self) -> Iterator[tuple[str, str]]:
        for name in (found.name for found in options()):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, str):
                    yield name, each

    @property
    def place(self) -> str:
        """Where the tasks run, without its hosts: one of PLACES, or whatever else was asked for."""
        return self.on.partition(":")[0]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that ssh is to reach; () at other places.

        Raises:
            LaunchError: There are none, a name is none, or is listed twice.
        """
        return parse_hosts(self.on.partition(":")[2]) if self.place == "ssh" else ()

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """How many tasks of each job were asked for, without those that have none; () where nothing says it."""
        every = (("chief", int(self.chief)), ("worker", self.workers or 0), ("ps", self.ps))
        return tuple((job, n) for job, n in (*every, ("evaluator", int(self.evaluator))) if n)

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which a launcher and an agent count each other as gone."""
        return max(5.0, self.heartbeat_timeout)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of `env`."""
        return dict(pair.partition("=")[::2] for pair in self.env)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `toolkit` with which this is asked for."""
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

    def to_json(self) -> str:
        """Returns a text that `from_json` makes the same spec of."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Returns the spec that `to_json` has written."""
        held = json.loads(text).items()
        found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in held}
        return cls(**found)


def options() -> tuple[Option, ...]:
    """Returns the attributes of a JobSpec that are flags."""
    fields = [field for field in dataclasses.fields(JobSpec) if field.metadata]
    return tuple(Option(name=field.name, default=field.default, **field.metadata) for field in fields)
