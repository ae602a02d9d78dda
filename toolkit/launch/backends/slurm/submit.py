"""The batch script, sbatch, the job's state, its logs, and its end."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.backends.slurm.spec import SlurmSpec
from toolkit.launch.record import FAILURE
from toolkit.support import files, redaction, signals

__all__ = ["script", "submit"]

_SECONDS = 1.0  # Between two looks at the logs.
_QUESTION = 5.0  # Between two questions to Slurm's controller, which is everybody's, unless the job has said something.
_DONE = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "FORGOTTEN",
)


def script(spec: SlurmSpec) -> str:
    """Returns the text of the batch script; what it runs is `toolkit.launch.backends.slurm.batch`."""
    options = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks": spec.tasks,
        "ntasks-per-node": spec.tasks_per_node,
        "cpus-per-task": spec.cpus_per_task,
        "gpus-per-task": spec.gpus_per_task or None,
        "time": spec.time,
        "partition": spec.partition,
        "account": spec.account,
        "signal": f"B:USR1@{spec.notice}",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    own = [f"--max_restarts={spec.max_restarts}", f"--tasks={spec.counted}", f"--logs={spec.logs.absolute()}"]
    own += [f"--start_timeout={spec.start_timeout:g}", f"--heartbeat_timeout={spec.heartbeat_timeout:g}"]
    own += ["--as_is"] if spec.as_is else []
    command = [sys.executable, "-m", "toolkit.launch.backends.slurm.batch", *own, "--", *spec.command]
    return "\n".join(["#!/bin/sh", *lines, "#SBATCH --requeue", f"exec {shlex.join(command)}", ""])


def submit(spec: SlurmSpec, *, show: Callable[[str], None]) -> None:
    """Submits the job, shows its logs, and returns when it is completed.

    A signal to this process cancels the job.

    Args:
        spec: What is to run.
        show: Is given whole lines, without their ends.

    Raises:
        LaunchError: Slurm isn't there, or doesn't take the job.
        TaskFailed: The job failed.
        JobStopped: This process received a signal to stop, and the job is cancelled.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            asked="--engine=slurm submits a job",
            found="there is no sbatch on this machine",
            remedy="Run it on a login node",
        )
    try:
        files.make_directory(spec.logs)
    except OSError as error:
        raise LaunchError(
            asked=f"the tasks' logs are to go to {spec.logs}",
            found=f"it can't be written ({(error.strerror or str(error)).lower()})",
            remedy="Name a directory that can be written with --log_dir",
        ) from error
    batch = spec.logs / "job.sh"
    batch.touch(mode=0o600)  # It holds the arguments as they are.
    batch.write_text(script(spec), encoding="utf-8", errors="surrogateescape")  # A file's name may be no text.
    output = str((spec.logs / "job.log").absolute()).replace("%", "%%")
    with signals.recorded() as received:  # Before there is a job: a signal that comes now cancels it, too.
        job = _asked(["sbatch", "--parsable", f"--output={output}", str(batch)]).strip().partition(";")[0]
        show(f"launch: Slurm job {job}, {spec.tasks} tasks on {spec.nodes} nodes; logs in {spec.logs}")
        followed = _Logs(spec.logs)
        state = _followed(job, followed, received, show)
        for line in followed.lines():
            show(line)
    if received:
        raise JobStopped(received[0])
    if state[0] != "COMPLETED":
        ended = f"Slurm job {job} ended as {state[0]}, exit code {state[1]}."
        raise TaskFailed(f"{ended} {_first(spec.logs)}Its logs are in {spec.logs}", code=state[1] or 1)
    show(f"launch: Slurm job {job} is completed")


def _followed(job: str, logs: "_Logs", received: list[int], show: Callable[[str], None]) -> tuple[str, int]:
    """Shows the logs until the job has ended; returns its state and exit code."""
    state, code, before, asked = "PENDING", 0, "", 0.0
    ran = cancelled = False
    while True:
        news = list(logs.lines())
        if time.monotonic() - asked > _QUESTION or any(line.startswith("job |") for line in news):
            asked = time.monotonic()
            state, code = _state(job)
            if ran and state == "PENDING":
                # Slurm lets a job that is queued again wait for two minutes unless its StartTime is set.
                command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
                subprocess.run(command, capture_output=True, check=False)
            ran = ran or state == "RUNNING"
        if state != before:
            show(f"launch: Slurm job {job} is {state}")
            before = state
        for line in news:
            show(line)
        if state in _DONE:
            return state, code
        if received and not cancelled:
            show(f"launch: {signal.Signals(received[0]).name}: cancelling Slurm job {job}")
            subprocess.run(["scancel", job], capture_output=True, check=False)
            cancelled = True
        time.sleep(_SECONDS)


def _state(job: str) -> tuple[str, int]:
    """Returns a job's state in Slurm's word, and its exit code, 128 + a signal's number where that ended it."""
    done = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, check=False)
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    code = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout)
    if found is None:  # Slurm forgets a job some minutes after its end; its controller may be away for a while.
        return ("FORGOTTEN" if "Invalid job id" in done.stderr else "UNKNOWN", 0)
    number = 0 if code is None else int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
    return found[1], number


def _first(logs: pathlib.Path) -> str:
    """A sentence about the task that failed first, where one has left word of it."""
    try:
        found = json.loads((logs / FAILURE).read_text(encoding="utf-8"))
        last = redaction.masked(str(found["last_lines"][-1]), os.environ) if found["last_lines"] else ""
        return f"{found['task']} failed first: it {found['words']}{': ' * bool(last)}{last}. "
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _asked(command: list[str]) -> str:
    # In a session of its own: a Ctrl-C that sbatch got, too, could leave a job behind that nobody knows.
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it wrote nothing"]
        raise LaunchError(
            asked="--engine=slurm submits a job",
            found=f"sbatch refused it: {lines[-1].removeprefix('sbatch: error: ')}",
            remedy="See what it says; --dry_run prints the script",
        )
    return done.stdout


class _Logs:
    """The tasks' logs, read as they grow."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._read: dict[pathlib.Path, int] = {}

    def lines(self) -> Iterator[str]:
        """Yields whole new lines, each with its task's rank."""
        for path in sorted([*self._directory.glob("task-*.log"), *self._directory.glob("job.log")]):
            name = "job" if path.stem == "job" else f"task {path.stem.partition('-')[2]}"
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    text = file.read()
            except OSError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield f"{name} | {redaction.masked(line, os.environ)}"
