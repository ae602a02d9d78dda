"""Jobs under Slurm: writes, submits and follows a batch script. `allocation` is what the script runs."""

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import controller, jobs
from toolkit.launch.display import Display
from toolkit.launch.follow import Follower
from toolkit.launch.record import PREFIX, SCRIPT_LOG, Record
from toolkit.launch.spec import JobSpec
from toolkit.launch.supervisor.agents import spread
from toolkit.support import alone, redaction, signals
from toolkit.support.words import counted

_SECONDS = 0.5  # Seconds between two looks at the logs.
_QUESTION = 5.0  # Seconds between two questions to Slurm's controller, which all users share.
_CLEANED = 15.0  # Seconds after which Slurm has cleaned up after a job that is queued again.
_TOLD = 20  # How many lines of the batch script's output a message has.
_LATE = 10.0  # Seconds until the job's files are visible here.


def rooms(spec: JobSpec) -> list[int]:
    """Returns how many tasks run on each node: an equal number, and one more on the first nodes."""
    each = spec.tasks_per_node or spec.gpus_per_node // (spec.gpus_per_task or 1) or 1
    return spread(sum(number for _, number in spec.counts) or spec.nodes * each, spec.nodes)


def script(spec: JobSpec, directory: pathlib.Path | None = None) -> str:
    """Returns the batch script.

    Args:
        spec: What is asked.
        directory: The job's own; None where the script is to be shown only.
    """
    room = max(rooms(spec))
    cores = max(room, spec.gpus_per_node or room * spec.gpus_per_task)
    if spec.cpus_per_task is not None:
        cores = room * int(spec.cpus_per_task)
    settings = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,  # One agent, with the node's share of the job for all its tasks.
        "cpus-per-task": cores if cores > 1 else None,
        "gpus-per-node": spec.gpus_per_node or room * spec.gpus_per_task or None,
        "time": spec.time,
        "partition": spec.partition,
        "account": spec.account,
        "signal": f"B:USR1@{spec.notice}",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{_quoted(f'{name}={value}')}" for name, value in settings.items() if value is not None]
    lines += [f"#SBATCH --{_quoted(text.removeprefix('--'))}" for text in spec.sbatch]
    shown = pathlib.Path(spec.log_dir or "runs", f"{PREFIX}ID") if directory is None else directory
    command = alone.command("toolkit.launch.backends.allocation", str(shown.absolute()))
    words = (*shlex.split(spec.prefix), *spec.command)
    tasks = shlex.join(redaction.masked_command(words, {**os.environ, **spec.environment}))
    # Always one line: line ends in arguments are shown escaped.
    number = spec.gpus_per_node // room if spec.gpus_per_node else spec.gpus_per_task
    gpus = f", each with {counted(number, 'GPU')}" if number else ""
    about = [
        f"# srun starts one launcher on each node. A launcher starts its node's tasks, up to {room}{gpus}.",
        f"# In all {counted(sum(rooms(spec)), 'task')} of {ascii(tasks)[1:-1]}"
        + ", from a copy of the script's folder" * spec.snapshot
        + f", started again at most {spec.max_restarts} times without progress" * bool(spec.max_restarts),
    ]
    if directory is None:
        about.append(
            "# For reading: `toolkit launch` submits it with a directory for the job. `toolkit init` writes a job.sh."
        )
    # A login shell knows `module` and the like. A line that fails ends the job before the script starts.
    setup = ["set -e", *spec.setup] if spec.setup else []
    shell = "#!/bin/bash -l" if setup else "#!/bin/sh"
    return "\n".join([shell, *lines, "#SBATCH --requeue", *about, *setup, f"exec {shlex.join(command)}", ""])


def _quoted(option: str) -> str:
    """Quotes an option of sbatch: it splits a line into words as a shell does."""
    name, equals, value = option.partition("=")
    return f"{shlex.quote(name)}{equals}{shlex.quote(value) if value else ''}"


def submit(spec: JobSpec, *, follow: bool, record: Record | None = None) -> jobs.Entry:
    """Submits the job, shows its output, and returns when it is complete.

    SIGINT or SIGTERM to this process cancels the job; it goes on where the terminal is lost.

    Args:
        spec: What is asked.
        follow: Whether to show it; otherwise this returns at once.
        record: What has been begun of it; None for a new one.

    Returns:
        Its record.

    Raises:
        LaunchError: Slurm isn't there, or doesn't take the job.
        TaskFailed: The job failed.
        JobStopped: This process received a signal.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            asked="--on=slurm submits a job",
            found="there is no sbatch on this machine",
            remedy="Run it on a login node",
        )
    if "\\" in os.path.abspath(spec.log_dir or ""):
        raise LaunchError(
            asked=f"--log_dir={spec.log_dir!r}",
            found="Slurm reads a backslash in a log's name in its own way",
            remedy="Name a directory without one",
        )
    record = record or Record.begin(spec)
    batch = record.directory / "job.sh"
    # A file's name may not be valid text.
    batch.write_text(script(spec, record.directory), encoding="utf-8", errors="surrogateescape")
    output = str((record.directory / SCRIPT_LOG).absolute()).replace("%", "%%")
    with signals.recorded() as received:  # Before the job exists, so that a signal that arrives now cancels it as well.
        job = _submitted(["sbatch", "--parsable", f"--output={output}", str(batch)])
        entry = jobs.add(record, slurm=job)
        if not follow:
            return entry
        with Display(show=spec.show, native_logs=spec.native_logs) as display:
            display.say(head(spec, entry))
            follow_job(job, Follower(record, display), display, received)
    return entry


def head(spec: JobSpec, job: jobs.Entry) -> str:
    """Returns the message about a submitted job."""
    tasks, nodes = counted(sum(rooms(spec)), "task"), counted(spec.nodes, "node")
    return f"launch: Slurm job {job.slurm}, {tasks} on {nodes}; logs in {job.directory}"


def follow_job(
    job: str, follower: Follower, display: Display, received: Sequence[int], *, cancels: bool = True
) -> None:
    """Shows a job's output until it ends.

    Args:
        job: Its number.
        follower: Reads what it leaves.
        display: Shows it.
        received: Signals to this process are appended to it.
        cancels: Whether a signal cancels the job.

    Raises:
        TaskFailed: The job failed.
        JobStopped: This process received a signal.
    """
    state, shown, asked, queued, announced, over = ("PENDING", 0), "", 0.0, 0.0, 0, 0.0
    while follower.end is None:
        found = follower.look()
        if any(event["event"] == "requeue" for event in found):
            queued, asked = time.monotonic(), 0.0
        if time.monotonic() - asked > _QUESTION:
            asked, state = time.monotonic(), controller.job_state(job)
            # Slurm keeps a job that is queued again waiting for two minutes; it can't start before its cleanup.
            if state[0] == "PENDING" and follower.attempt and time.monotonic() - queued > _CLEANED:
                controller.start_now(job)
        if state[0] != shown:
            shown = state[0]
            display.say(f"launch: Slurm job {job} is {shown}")
        if received and (not cancels or received[0] == signal.SIGHUP):
            raise JobStopped(received[0], then=f"Slurm job {job} runs on")
        if announced < len(received):
            display.say(f"launch: {signal.Signals(received[announced]).name}: cancelling Slurm job {job}")
            announced += 1
            controller.stop(job)
        if state[0] not in controller.ALIVE:  # The job's last events may be visible later than its end.
            over = over or time.monotonic()
            if time.monotonic() - over > (_LATE if follower.attempt or state[0] != "CANCELLED" else 0.0):
                break
        time.sleep(_SECONDS)
    follower.look()
    if received:
        raise JobStopped(received[0])
    if follower.end is None:
        logs = f"Its logs are in {follower.record.directory}"
        text = f"Slurm job {job} ended in state {state[0]}, exit code {state[1]}. {logs}"
        if written := follower.record.beginnings().splitlines()[-_TOLD:]:
            text += "\nIts batch script wrote last:\n" + "\n".join(f"  {line}" for line in written)
        raise TaskFailed(text, code=state[1] or 1)
    follower.conclude()


def _submitted(command: list[str]) -> str:
    # In its own session: a Ctrl-C that also reached sbatch could leave a job that no one knows.
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it wrote nothing"]
        raise LaunchError(
            asked="--on=slurm submits a job",
            found=f"sbatch refused it: {lines[-1].removeprefix('sbatch: error: ')}",
            remedy="See what it says; --dry_run prints the script",
        )
    return done.stdout.strip().partition(";")[0]
