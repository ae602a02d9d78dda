"""Supervises a job in this process: on this machine, on hosts by ssh, or with launchers of other hosts."""

import secrets
import signal

from toolkit.errors import ToolkitError
from toolkit.launch.backends import joining, rendezvous, rendezvous_socket
from toolkit.launch.backends.local import LocalPlace
from toolkit.launch.backends.ssh import SshPlace
from toolkit.launch.display import output
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records.record import Record
from toolkit.launch.supervisor.agents import Place
from toolkit.launch.supervisor.supervise import supervise
from toolkit.support import signals

__all__ = ["run_here"]


def run_here(spec: JobSpec, record: Record | None = None) -> None:
    """Supervises a job on this machine or on hosts, in this process, to its end.

    Args:
        spec: What is asked.
        record: What has been begun of it; None for a new one.

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, a host is gone, or no task made progress.
        JobStopped: This program received a signal to stop.
    """

    def place() -> Place:
        if listener is not None:
            return rendezvous.RendezvousPlace(spec, listener, received, say)
        if spec.place == "ssh":
            hosts = SshPlace(spec, mark=secrets.token_hex(8))
            hosts.copy(received)
            return hosts
        return LocalPlace(spec)

    def say(message: str) -> None:
        output.say(message)
        if record is not None:
            record.add("note", text=message)

    def nearly_up(*_: object) -> None:  # Some clusters send this before they kill, and it would end Python.
        received.append(signal.SIGTERM)

    notice = signals.handle((signal.SIGUSR1,), nearly_up)
    with signals.recorded() as received, notice:
        listener = rendezvous_socket.listen(spec) if spec.rendezvous else None
        if spec.rendezvous and listener is None:
            _join(spec, received, record)
            return
        supervise(spec, place, received=received, record=record)


def _join(spec: JobSpec, received: list[int], record: Record | None) -> None:
    """Joins a job that another host's launcher supervises, and records its beginning and its end."""
    if record is None:
        joining.join(spec, received)
        return
    record.add("started", task="")
    try:
        joining.join(spec, received, work=record.call())
    except ToolkitError as error:
        record.end(error)
        raise
    record.end(None, "launch: done")
