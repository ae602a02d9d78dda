"""Jobs in a queue: writes, submits and follows a batch script. `allocation` is what the script runs."""

import os
import pathlib
import shlex
import shutil
import signal
import time
from collections.abc import Sequence

from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import jobs, queues
from toolkit.launch.display import Display
from toolkit.launch.follow import Follower
from toolkit.launch.record import PREFIX, SCRIPT_LOG, Record
from toolkit.launch.spec import JobSpec
from toolkit.support import alone, redaction, signals
from toolkit.support.words import counted

_SECONDS = 0.5  # Seconds between two looks at the logs.
_QUESTION = 5.0  # Seconds between two questions to the queue, which all users share.
_TOLD = 20  # How many lines of the batch script's output a message has.
_LATE = 10.0  # Seconds until the job's files are visible here.


def script(spec: JobSpec, directory: pathlib.Path | None = None) -> str:
    """Returns the batch script.

    Args:
        spec: What is asked.
        directory: The job's own; None where the script is to be shown only.
    """
    queue, rooms = queues.find(spec.place), spec.rooms
    shown = pathlib.Path(spec.log_dir or "runs", f"{PREFIX}ID") if directory is None else directory
    words = (*shlex.split(spec.prefix), *spec.command)
    tasks = shlex.join(redaction.masked_command(words, {**os.environ, **spec.environment}))
    # Always one line: line ends in arguments are shown escaped.
    number = spec.gpus_per_node // max(rooms) if spec.gpus_per_node else spec.gpus_per_task
    gpus = f", each with {counted(number, 'GPU')}" if number else ""
    written = shlex.join(redaction.masked_command(["toolkit", *spec.arguments], {**os.environ, **spec.environment}))
    about = [
        f"# Written by: {''.join(each if each.isprintable() else ascii(each)[1:-1] for each in written)}",
        f"# {queue.starts} starts one launcher on each node. "
        f"A launcher starts its node's tasks, up to {max(rooms)}{gpus}.",
        f"# In all {counted(sum(rooms), 'task')} of {ascii(tasks)[1:-1]}"
        + ", from a copy of the script's folder" * spec.snapshot
        + f", started again at most {spec.max_restarts} times without progress" * bool(spec.max_restarts),
    ]
    if directory is None:
        about.append(
            "# For reading: `toolkit launch` submits it with a directory for the job. `toolkit init` writes a job.sh."
        )
    return queue.script(spec, rooms, about, alone.command("toolkit.launch.backends.allocation", str(shown.absolute())))


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
        LaunchError: The queue isn't there, or doesn't take the job.
        TaskFailed: The job failed.
        JobStopped: This process received a signal.
    """
    queue = queues.find(spec.place)
    if shutil.which(queue.submits) is None:
        raise LaunchError(
            asked=f"--on={spec.place} submits a job",
            found=f"there is no {queue.submits} on this machine",
            remedy="Run it on a login node",
        )
    if why := queue.unfit(os.path.abspath(spec.log_dir or "")):
        raise LaunchError(
            asked=f"--log_dir={spec.log_dir!r}", found=why, remedy="Name a directory without such characters"
        )
    record = record or Record.begin(spec)
    batch = record.directory / "job.sh"
    # A file's name may not be valid text.
    batch.write_text(script(spec, record.directory), encoding="utf-8", errors="surrogateescape")
    output = (record.directory / SCRIPT_LOG).absolute()
    with signals.recorded() as received:  # Before the job exists, so that a signal that arrives now cancels it as well.
        job = queue.submit(batch, output)
        entry = jobs.add(record, queue=spec.place, number=job)
        if not follow:
            return entry
        with Display(show=spec.show, native_logs=spec.native_logs) as display:
            display.say(head(spec, entry))
            follow_job(queue, job, Follower(record, display), display, received)
    return entry


def head(spec: JobSpec, job: jobs.Entry) -> str:
    """Returns the message about a submitted job."""
    tasks, nodes = counted(sum(spec.rooms), "task"), counted(spec.nodes, "node")
    return f"launch: {queues.find(spec.place).name} job {job.number}, {tasks} on {nodes}; logs in {job.directory}"


def follow_job(
    queue: queues.Queue,
    job: str,
    follower: Follower,
    display: Display,
    received: Sequence[int],
    *,
    cancels: bool = True,
) -> None:
    """Shows a job's output until it ends.

    Args:
        queue: Which has it.
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
            asked, state = time.monotonic(), queue.state(job)
            # A queue may keep a job that is queued again waiting; it can't start before the queue has cleaned up.
            if state[0] == "PENDING" and follower.attempt and time.monotonic() - queued > queue.cleaned:
                queue.start_now(job)
        if state[0] != shown:
            shown = state[0]
            display.say(f"launch: {queue.name} job {job} is {shown}")
        if received and (not cancels or received[0] == signal.SIGHUP):
            raise JobStopped(received[0], then=f"{queue.name} job {job} runs on")
        if announced < len(received):
            display.say(f"launch: {signal.Signals(received[announced]).name}: cancelling {queue.name} job {job}")
            announced += 1
            queue.stop(job)
        if state[0] not in queue.alive:  # The job's last events may be visible later than its end.
            over = over or time.monotonic()
            if time.monotonic() - over > (_LATE if follower.attempt or state[0] != "CANCELLED" else 0.0):
                break
        time.sleep(_SECONDS)
    follower.look()
    if received:
        raise JobStopped(received[0])
    if follower.end is None:
        logs = f"Its logs are in {follower.record.directory}"
        text = f"{queue.name} job {job} ended in state {state[0]}, exit code {state[1]}. {logs}"
        if written := follower.record.beginnings().splitlines()[-_TOLD:]:
            text += "\nIts batch script wrote last:\n" + "\n".join(f"  {line}" for line in written)
        raise TaskFailed(text, code=state[1] or 1)
    follower.conclude()
