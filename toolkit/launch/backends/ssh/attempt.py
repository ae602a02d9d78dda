"""One start of the job on the hosts that are there, to the last task's end."""

import selectors
import signal
import time
from collections.abc import Sequence
from typing import Any

from toolkit.cluster import Cluster
from toolkit.errors import JobStopped, TaskFailed
from toolkit.launch import Display
from toolkit.launch.backends.ssh import wire
from toolkit.launch.backends.ssh.connection import Connection
from toolkit.launch.backends.ssh.host_tasks import HostTasks
from toolkit.launch.backends.ssh.spec import Host, SshSpec

__all__ = ["Attempt"]

_TICK = 0.05  # Seconds.
_LAST = 10.0  # Seconds that servers get to see that their chief is gone.
_LEEWAY = 5.0  # Seconds for the report of an end to arrive.
_CALL = 10.0  # Seconds between two calls to a host that is gone.


class Attempt:
    """The tasks of a job on all hosts, from their start to their end.

    Args:
        spec: What was asked.
        hosts: The tasks of each host that is there.
        cluster: All tasks.
        missing: Hosts that are to be called, and taken in when they answer.
        token: The job's own, as `Connection` takes it.
        job_id: The id that the job's files are named by.
        number: The attempt's number, from 1.
        display: Shows messages.
        received: Signals to the launcher are appended to it.
    """

    def __init__(
        self,
        spec: SshSpec,
        hosts: Sequence[HostTasks],
        cluster: Cluster,
        missing: Sequence[Host],
        *,
        token: str,
        job_id: str,
        number: int,
        display: Display,
        received: list[int],
    ) -> None:
        self.spec = spec
        self.hosts = hosts
        self.missing = missing
        self.token = token
        self.display = display
        self._received = received
        self._calls: list[Connection] = []
        self._called = time.monotonic()
        self._silence = max(5.0, spec.heartbeat_timeout)
        self._selector = selectors.DefaultSelector()
        options = {
            "as_is": spec.as_is,
            "start_timeout": spec.start_timeout,
            "heartbeat_timeout": spec.heartbeat_timeout,
            "stall_timeout": spec.stall_timeout,
            "grace": spec.grace,
            "attempt": number,
            "job_id": job_id,
        }
        for host in hosts:
            self._selector.register(host.connection.descriptor, selectors.EVENT_READ)
            host.connection.send(
                "start",
                cluster=cluster.as_dict(),
                tasks=list(host.tasks),
                command=list(spec.command),
                environment=dict(spec.environment),
                options=options,
            )

    def run(self) -> bool:
        """Returns True when the job is done, False when it is to be started again with a host that is back.

        Raises:
            TaskFailed: A task failed, or a host is gone.
            JobStopped: The launcher received a signal to stop.
        """
        try:
            while not self._done():
                self._turn()
                if self._received:
                    self._stop_on_signal()
                self._look_for_failure()
                if self._is_back():
                    self._stop(signal.SIGTERM)
                    return False
            self._wait(_LAST, lambda: all(host.ended for host in self.hosts))
            self._stop(signal.SIGTERM)
            return True
        finally:
            for connection in (*self._calls, *(host.connection for host in self.hosts)):
                connection.close()
            self._selector.close()

    def _done(self) -> bool:
        return all(host.ended and host.ended["how"] == "done" for host in self.hosts if host.trains)

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TICK):
            host = next(host for host in self.hosts if host.connection.descriptor == key.fd)
            gone = host.connection.gone
            host.take()
            if gone:
                self._selector.unregister(key.fd)
        for host in self.hosts:
            host.connection.beat()
        self.display.draw(lambda: [row for host in self.hosts for row in host.rows])

    def _look_for_failure(self) -> None:
        failed = next((p for p in self.hosts if p.ended and p.ended["how"] != "done"), None)
        lost = self._lost()
        if failed is None and lost is None:
            return
        # A task fails because a host is gone, and says so before that host has been silent for long enough.
        quiet = [p for p in self.hosts if not p.ended and p.connection.silence > 3 * wire.BEAT]
        if lost is None and quiet:
            self._wait(
                self._silence, lambda: self._lost() or all(p.ended or p.connection.silence < wire.BEAT for p in quiet)
            )
            lost = self._lost()
        self._stop(signal.SIGTERM)
        if lost is not None:
            raise TaskFailed(f"{lost[0]} is gone: {lost[1]}. Its tasks were {', '.join(lost[2])}.", code=1)
        if failed is not None and failed.ended is not None:
            raise TaskFailed(f"On {failed.name}: {failed.last_message}", code=int(failed.ended.get("code") or 1))

    def _lost(self) -> tuple[str, str, list[str]] | None:
        for host in self.hosts:
            if not host.ended and host.connection.gone:
                host.take()  # Its last message may still be unread.
            if host.ended:
                continue
            silence = host.connection.silence
            # ssh, too, gives up after a while.
            if silence > self._silence or (host.connection.gone and silence > 3 * wire.BEAT):
                return host.name, f"nothing was heard of it for {silence:.0f} s", list(host.tasks)
            if host.connection.gone:
                return host.name, host.connection.last_line(), list(host.tasks)
        return None

    def _is_back(self) -> bool:
        """Calls the hosts that are missing, once in a while, when the others have come so far that it pays."""
        if not self.missing or not any(host.steps for host in self.hosts):
            return False
        for call in list(self._calls):
            call.read()
            if call.ready is not None:
                self.display.say(
                    f"launch: {call.host.name} is back; the tasks write a checkpoint and start again with it"
                )
                return True
            if call.refused or call.gone:
                call.close()
                self._calls.remove(call)
        now = time.monotonic()
        if now - self._called > _CALL:
            self._called = now
            busy = {call.host for call in self._calls}
            self._calls += [
                Connection(self.spec, host, token=self.token, first=False) for host in self.missing if host not in busy
            ]
        return False

    def _stop_on_signal(self) -> None:
        number = self._received[0]
        grace = self.spec.grace
        self.display.say(
            f"{signal.Signals(number).name}: asking all tasks to end, {grace:g} s; once more ends them at once"
        )
        self._stop(number)
        raise JobStopped(number)

    def _stop(self, number: int) -> None:
        """Asks all tasks to end, and waits; a further signal to the launcher is passed on, and cuts it short."""
        known = len(self._received)
        left = [host for host in self.hosts if not host.ended]
        for host in left:
            host.connection.send("stop", signal=int(number))
        self._wait(
            self.spec.grace + _LEEWAY,
            lambda: all(self._over(host) for host in left) or len(self._received) > known,
        )
        if len(self._received) > known:
            for host in left:
                host.connection.send("stop", signal=int(number))
            self._wait(_LEEWAY, lambda: all(self._over(host) for host in left))

    def _over(self, host: HostTasks) -> bool:
        return bool(host.ended) or host.connection.gone or host.connection.silence > self._silence

    def _wait(self, seconds: float, until: Any) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self._turn()
