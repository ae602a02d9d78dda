"""The rules for the values of a job; each raises a LaunchError with its own sentence.

What queues and kubectl check themselves is left to them.
"""

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

from toolkit.cluster import Task, split
from toolkit.errors import ClusterError, LaunchError

# As sbatch takes it: minutes, h:m:s, days-hours ...
_TIME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9}){0,2}|(:[0-9]{1,9}){1,2})?")
_MOST, _MOST_HERE = 100_000, 1000  # The most tasks of a job, and on one machine.
UNLIMITED = ("UNLIMITED", "INFINITE")  # Time limits that are none.
EVERYBODY = ("all", "none")  # What --show takes instead of a task's name.
_OWN = ("TF_CONFIG", "RANK", "LOCAL_RANK", "WORLD_SIZE")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def require(holds: bool, asked: str, found: str, remedy: str) -> None:
    """Raises a LaunchError with this sentence unless a condition holds."""
    if not holds:
        raise LaunchError(asked=asked, found=found, remedy=remedy)


def job(spec: Any) -> None:
    """Checks a JobSpec whose values are each of the right type, within bounds, and at a place where they apply."""
    require(
        bool(spec.command) and spec.command != ("-m",),
        "launch starts a script or a module",
        "none is named",
        "Name it after launch's own flags: toolkit launch --workers=2 train.py, or -m MODULE",
    )
    for text in (*spec.command, *spec.texts):
        require(
            "\0" not in text,
            f"the argument {text[:60]!r}",
            "it holds a NUL character, which no program's arguments can hold",
            "Leave the NUL out",
        )
    _counts(spec.counts)
    require(
        spec.workers != 0 or spec.chief,
        "--workers=0",
        "there is no chief either, so no task would train",
        "Leave it out for a worker on each GPU, or add --chief",
    )
    if spec.rendezvous is not None:
        _address("rendezvous", spec.rendezvous)
    for pair in spec.env:
        _variable(pair)
    _prefix(spec.prefix)
    require(spec.log_dir != "", "--log_dir=", "it names no directory", "Leave it out, or name one")
    for name in (*spec.task, *(each for each in spec.show if each not in EVERYBODY)):
        try:
            Task.parse(name)
        except ClusterError as error:
            raise LaunchError(asked=error.asked, found=error.found, remedy=error.remedy) from None
    require(
        not spec.queued or (spec.cpus_per_task or "1").isdecimal(),
        f"--cpus_per_task={spec.cpus_per_task}",
        "that isn't a number of cores",
        "Give a whole number from 1",
    )
    single_lines(**{n: getattr(spec, n) for n in ("name", "partition", "account", "time", "cpus_per_task")})
    if spec.time is not None:
        time_limit(spec.time, notice=spec.notice)
    _together(spec)


def _counts(jobs: Sequence[tuple[str, int]]) -> None:
    """Checks the numbers of tasks: at least one task trains, and parameter servers have a chief.

    Args:
        jobs: Such as (("chief", 1), ("worker", 2)), none of them 0.
    """
    for name, number in jobs:
        require(
            0 < number <= _MOST,
            f"{number} tasks of job {name}",
            "that isn't a number of tasks",
            f"Give 0 to {_MOST:,}",
        )
    names = {name for name, _ in jobs}
    require(
        not names or bool({"worker", "chief"} & names),
        "launch " + ", ".join(f"{name}: {number}" for name, number in jobs),
        "there is no chief or worker, so no task would train",
        "Add --workers=2, or --chief",
    )
    require(
        "ps" not in names or "chief" in names,
        f"{dict(jobs).get('ps', 0)} parameter servers",
        "there is no chief, which schedules the workers' steps",
        "Add --chief",
    )


def _address(name: str, value: str) -> None:
    """Checks that a value is HOST:PORT."""
    try:
        fits = split(value)[1] > 0
    except (ClusterError, ValueError):
        fits = False
    require(fits, f"--{name}={value[:60]}", "that isn't an address", "Write HOST:PORT, such as 10.0.0.1:29400")


def _variable(pair: str) -> None:
    """Checks that the NAME of NAME=VALUE can be a variable's name."""
    name, sign, _ = pair.partition("=")
    require(
        bool(_VARIABLE.fullmatch(name)),
        f"--env={name[:60]!r}",
        "that can't be a variable's name",
        "Write --env=NAME for its value here, or --env=NAME=VALUE",
    )
    require(
        name not in _OWN,
        f"--env={name[:60]}",
        "the launcher gives each task its own",
        "Leave it out, or give your variable another name",
    )
    require(bool(sign), f"--env={name[:60]}", "it has no value here", "Write --env=NAME=VALUE, or leave it out")


def _prefix(text: str) -> None:
    """Checks that a shell can split a command prefix into words."""
    try:
        shlex.split(text)
        found = ""
    except ValueError as error:
        found = str(error).lower()
    require(not found, f"--prefix={text[:60]!r}", f"a shell couldn't read it ({found})", "Close its quotes")


def _together(spec: Any) -> None:
    """Checks that the numbers of tasks, hosts and nodes fit together."""
    wanted, room = sum(number for _, number in spec.counts), sum(host.tasks for host in spec.hosts)
    each = spec.tasks_per_node
    few, of_ssh = spec.min_workers, spec.place == "ssh"
    others = any(job != "worker" for job, _ in spec.counts)
    known = "the number of tasks comes either from flags such as --workers or from --cluster"
    lone = f"--task={''.join(spec.task[:1])} starts one task of a cluster"
    together, spread = f"the job has {wanted} tasks", f"--nodes={spec.nodes} --tasks_per_node={each}"
    fewer = f"--min_workers={few} lets a job go on with fewer workers"
    for holds, asked, found, remedy in (
        (not (wanted and spec.cluster), known, "both are given", "Give one of the two"),
        (
            not spec.task or spec.cluster,
            lone,
            "no --cluster describes one",
            "Add --cluster=FILE, or leave --task out",
        ),
        (
            not of_ssh or wanted in (0, room),
            together,
            f"the hosts of --on=ssh have room for {room}",
            "Write how many tasks each host gets: --on=ssh:a:2,b",
        ),
        (
            not (spec.rendezvous and spec.cluster),
            f"--rendezvous={spec.rendezvous}",
            "--cluster describes the hosts already",
            "Leave one of the two out",
        ),
        (
            not (spec.snapshot and spec.rendezvous),
            "--snapshot",
            "at a rendezvous each host runs what it has itself",
            "Leave it out, or copy the folder to every host",
        ),
        (
            spec.max_restarts or not spec.max_total_restarts,
            f"--max_total_restarts={spec.max_total_restarts}",
            "--max_restarts is 0, so the job never restarts",
            "Add --max_restarts=N: the most restarts in a row without progress",
        ),
        (few <= room, f"--min_workers={few}", f"the hosts have room for {room} tasks", f"Give from 1 to {room}"),
        (
            not few or not others,
            fewer,
            "this job also has a chief, ps or evaluator, which it can't lose",
            "Use it in jobs of workers only; with parameter servers, --max_restarts restarts a lost worker alone",
        ),
        (
            not wanted or each is None or wanted == spec.nodes * each,
            spread,
            together,
            "Leave --tasks_per_node out, or count the tasks of all jobs",
        ),
        (
            not (spec.gpus_per_node and spec.gpus_per_task) or spec.gpus_per_node % spec.gpus_per_task == 0,
            f"--gpus_per_node={spec.gpus_per_node} --gpus_per_task={spec.gpus_per_task}",
            "GPUs of each node would stay idle",
            "Give numbers that divide",
        ),
        (
            not wanted or wanted >= spec.nodes,
            f"--nodes={spec.nodes}",
            f"there are {wanted} tasks to run there",
            "Ask for fewer nodes",
        ),
        (
            spec.place != "local" or spec.nodes > 1 or wanted <= _MOST_HERE,
            f"{wanted:,} tasks on this machine",
            f"that is more than {_MOST_HERE:,}, and each is a process with its own TensorFlow",
            "Start fewer",
        ),
        (
            spec.place != "local" or spec.nodes == 1 or spec.rendezvous,
            f"--nodes={spec.nodes}",
            "the hosts need an address at which to meet",
            "Add the same --rendezvous=HOST:PORT on every host, or --on=slurm",
        ),
    ):
        require(bool(holds), asked, found, remedy)


def single_lines(**texts: str | None) -> None:
    """Checks that a directive of a batch script is a single line."""
    for flag, text in texts.items():
        require(
            text is None or text.isprintable(),
            f"--{flag}={text!r:.60}",
            "that isn't a single line of a batch script",
            "Leave line ends and the like out",
        )


def time_limit(text: str, *, notice: int) -> None:
    """Checks that a time limit is one, as sbatch takes it, and longer than the notice before it."""
    if text.upper() in UNLIMITED:
        return
    require(
        bool(_TIME.fullmatch(text)),
        f"--time={text}",
        "that is no time",
        "Give minutes, such as 480, or hours:minutes:seconds, such as 8:00:00, or days-hours, such as 1-12",
    )
    require(
        notice < seconds(text),
        f"--time={text} with {notice} s of notice",
        "tasks would get the notice to end as soon as they begin",
        "Give more time or less notice",
    )


def seconds(time: str) -> int:
    """Returns the seconds of a time limit: minutes, minutes:seconds, h:m:s, days-hours, d-h:m, d-h:m:s."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, rest = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, rest = parts
    else:
        hours, (minutes, rest) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def shown(names: Sequence[str], started: Sequence[str]) -> None:
    """Checks that the tasks to show are among those that are started.

    Args:
        names: As they were given.
        started: The tasks that are.
    """
    for name in names:
        require(
            name in (*started, *EVERYBODY),
            f"--show={name} shows that task's lines",
            f"the tasks started here are {', '.join(started[:12])}",
            "Name one of them",
        )


def script(words: Sequence[str], *, where: str = "") -> None:
    """Checks that a command's script is a file on this machine.

    Args:
        words: The command.
        where: Which machine this is, as a clause: " on b"; "" for the user's own.
    """
    fault = "" if words[0] == "-m" else _no_file(words[0])
    require(
        not fault,
        f"launch starts the script {words[0]}{where}",
        fault,
        "Check the path, or start a module with -m MODULE",
    )


def _no_file(path: str) -> str:
    """Returns why a path isn't a file that can be run; "" if it is one."""
    try:
        if os.path.isfile(path):
            return ""
        os.stat(path)
        return "that is a directory" if os.path.isdir(path) else "it is no plain file"
    except ValueError:  # A character that no file name can have.
        return "there is no such file"
    except OSError as error:  # Also for a name of 300 characters.
        return "there is no such file" if isinstance(error, FileNotFoundError) else (error.strerror or "").lower()
