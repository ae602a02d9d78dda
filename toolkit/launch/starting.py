"""Starts a job from a spec: in this process, in its own session, or in a queue; or says what would be started.

    python .../alone.py toolkit.launch.starting DIRECTORY

supervises a job that outlives its terminal: job.json in the job's own directory says what was asked.
"""

import dataclasses
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch import checks
from toolkit.launch.spec import JobSpec
from toolkit.support import alone, redaction, signals

if TYPE_CHECKING:  # `toolkit launch --help` imports this file, and needs no backend, no supervisor and no display.
    from toolkit.launch.jobs import Entry
    from toolkit.launch.record import Record
    from toolkit.launch.supervisor.agents import Backend

_TICK = 0.05


def start(spec: JobSpec, *, detach: bool = False) -> str:
    """Runs a job where its spec says, and returns when all its tasks are done.

    Args:
        spec: What is asked.
        detach: Return when it is started; it goes on by itself, also without the terminal.

    Returns:
        What to say of a detached job; "" of one that is done.

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, a host is gone, or no task made progress.
        JobStopped: This program received a signal to stop.
    """
    if spec.queued:
        checks.script(spec.command)
    if not detach:
        run_to_end(spec)
        return ""
    job = start_detached(spec)
    if job.queue:
        from toolkit.launch.backends import queued

        return queued.head(spec, job)
    afterwards = f"See it with `toolkit attach {job.id}`, end it with `toolkit stop {job.id}`."
    return f"launch: job {job.id} runs; logs in {job.directory}\n{afterwards}"


def dry_run(spec: JobSpec) -> str:
    """Returns the commands that would be run, with secrets masked. Starts nothing and connects to no host.

    The text is a shell command for each task (on this machine), a line for each host (ssh), the batch script (a queue)
    or the manifest (Kubernetes).

    Raises:
        RequestError: What was asked can't be done.
    """
    if spec.place == "kubernetes":
        from toolkit.launch.backends import kubernetes

        return kubernetes.manifest_text(spec)
    if spec.queued:
        from toolkit.launch.backends import queued

        checks.script(spec.command)
        return queued.script(spec)
    known = {**os.environ, **spec.environment}
    if spec.place == "ssh":
        from toolkit.launch.backends.ssh import SshBackend
        from toolkit.launch.supervisor.agents import assign

        by_ssh = SshBackend(spec, mark="")
        _, tasks = assign(spec.counts, by_ssh.hosts, by_ssh.addresses)
        checks.shown(spec.show, list(map(str, tasks)))
        shown = _command(spec, by_ssh.python, known)
        return "\n".join(
            f"# {host.name}, {by_ssh.addresses[host]}, in {by_ssh.directory}: "
            f"{', '.join(str(task) for task, home in tasks.items() if home == host)}: {shown}"
            for host in by_ssh.hosts
        )
    if spec.rendezvous:
        return (
            f"# {spec.nodes} hosts come together at {spec.rendezvous}, where addresses and ports are chosen; "
            f"this one then starts its tasks of\n{_command(spec, sys.executable, known)}"
        )
    return "\n".join(_local_lines(spec))


def _command(spec: JobSpec, python: str, known: Mapping[str, str]) -> str:
    """Returns a task's command for a shell, with its variables, without secrets."""
    added = [f"{name}={value}" for name, value in spec.environment.items()]
    return shlex.join(redaction.masked_command((*(["env"] if added else []), *added, python, *spec.command), known))


def _local_lines(spec: JobSpec) -> list[str]:
    from toolkit.launch.agent import tasks
    from toolkit.launch.backends.local import LocalBackend

    checks.script(spec.command)
    cluster, homes = LocalBackend(spec).planned()
    checks.shown(spec.show, list(map(str, homes)))
    specs, note = tasks.task_specs(
        cluster,
        list(homes),
        command=spec.command,
        prefix=shlex.split(spec.prefix),
        environ={**os.environ, **spec.environment},
        settings={},
        as_is=spec.as_is,
        partial=len(homes) < len(cluster.tasks),
        socket_path="/dev/null",
    )
    return [*([f"# {note}"] if note else []), *(tasks.shell_line(t, os.environ, spec.environment) for t in specs)]


def run_to_end(spec: JobSpec, record: "Record | None" = None) -> None:
    """Runs a job, which this process supervises unless a queue has it, and returns when it is done.

    Args:
        spec: What is asked.
        record: What has been begun of it; None for a new one.

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, a host is gone, or no task made progress.
        JobStopped: This program received a signal to stop.
    """
    if spec.queued:
        from toolkit.launch.backends import queued

        queued.submit(spec, follow=True, record=record)
        return
    from toolkit.launch import display
    from toolkit.launch.backends import rendezvous
    from toolkit.launch.backends.local import LocalBackend
    from toolkit.launch.backends.ssh import SshBackend
    from toolkit.launch.supervisor.supervise import supervise

    def backend() -> "Backend":
        if listener is not None:
            return rendezvous.RendezvousBackend(spec, listener, received, say)
        if spec.place == "ssh":
            hosts = SshBackend(spec, mark=secrets.token_hex(8))
            hosts.copy(received)
            return hosts
        return LocalBackend(spec)

    def say(message: str) -> None:
        display.say(message)
        if record is not None:
            record.add("note", text=message)

    def nearly_up(*_: object) -> None:  # Some clusters send this before they kill, and it would end Python.
        received.append(signal.SIGTERM)

    notice = signals.handle((signal.SIGUSR1,), nearly_up)
    with signals.recorded() as received, notice:
        listener = rendezvous.listen(spec) if spec.rendezvous else None
        if spec.rendezvous and listener is None:
            _join(spec, received, record)
            return
        supervise(spec, backend, received=received, record=record)


def _join(spec: JobSpec, received: list[int], record: "Record | None") -> None:
    """Joins a job that another host's launcher supervises, and records its beginning and its end."""
    from toolkit.launch.backends import rendezvous

    if record is None:
        rendezvous.join(spec, received)
        return
    record.add("started", task="")
    try:
        rendezvous.join(spec, received, work=record.call())
    except BaseException as error:
        record.end(error)
        raise
    record.end(None, "launch: done")


def start_detached(spec: JobSpec, record: "Record | None" = None) -> "Entry":
    """Starts a job in its own session, and returns when its tasks have started, or when a queue has it.

    Args:
        spec: What is asked.
        record: What has been begun of it; None for a new one.

    Raises:
        LaunchError: What was asked can't be done.
        TaskFailed: Its supervisor ended at once.
        JobStopped: This process received a signal before; the job is ended.
    """
    if spec.queued:
        from toolkit.launch.backends import queued

        return queued.submit(spec, follow=False, record=record)
    from toolkit.launch import jobs
    from toolkit.launch.record import LAUNCHER_LOG, Record

    record = record or Record.begin(spec)
    with open(record.directory / LAUNCHER_LOG, "ab") as log:
        process = subprocess.Popen(
            alone.command("toolkit.launch.starting", str(record.directory.absolute())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    entry = jobs.add(record, pid=process.pid)
    with signals.recorded() as received:
        _wait_for_tasks(process, record, received)
    return entry


def _wait_for_tasks(process: subprocess.Popen, record: "Record", received: Sequence[int]) -> None:
    """Waits until its tasks have started, and meanwhile shows its supervisor's messages."""
    from toolkit.launch import display
    from toolkit.launch.record import LAUNCHER_LOG

    begun = False
    while True:
        found = record.new()
        begun = begun or any(event["event"] == "attempt" for event in found)
        for each in found:
            if each["event"] == "note" and not begun:  # For example, for which hosts it waits.
                display.say(each["text"])
        if received:  # The user doesn't know its id yet.
            process.terminate()
            process.wait()
            raise JobStopped(received[0])
        if end := next((event for event in found if event["event"] == "end" and event["code"]), None):
            process.wait()
            if "asked" in end:
                raise LaunchError(asked=end["asked"], found=end["found"], remedy=end["remedy"])
            raise TaskFailed(end["text"], code=end["code"])
        if any(event["event"] in ("started", "end") for event in found):
            threading.Thread(target=process.wait, daemon=True).start()  # Or a notebook reaps child processes.
            return
        if process.poll() is not None:
            last_lines = record.beginnings().splitlines()[-1:] or ["nothing, and perhaps the disk is full"]
            raise TaskFailed(
                f"The job's launcher ended at once, with exit code {process.returncode}. "
                f"It wrote to {record.directory / LAUNCHER_LOG}: {last_lines[0]}",
                code=1,
            )
        time.sleep(_TICK)


def _main() -> int:
    from toolkit.launch.record import Record

    record = Record(pathlib.Path(sys.argv[1]))
    try:
        spec: JobSpec = record.job()["spec"]
        # The logs hold the output of tasks; this file holds the launcher's own messages.
        run_to_end(dataclasses.replace(spec, show=spec.show or ("none",)), record)
    except ToolkitError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
