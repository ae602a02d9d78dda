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
from toolkit.launch.backends.ssh.hosts import Host
from toolkit.launch.backends.ssh.part import Part
from toolkit.launch.backends.ssh.request import Request

__all__ = ["Attempt"]

_TICK = 0.05  # Seconds.
_LAST = 10.0  # Seconds that servers get to see that their chief is gone.
_LEEWAY = 5.0  # Seconds for the news of an end to arrive.
_CALL = 10.0  # Seconds between two calls to a host that is gone.


class Attempt:
    """The parts of a job, from their start to their end.

    Args:
        request: What was asked.
        parts: One for each host that is there.
        cluster: All tasks.
        missing: Hosts that are to be called, and taken in when they answer.
        mark: Of this job.
        began: What the job's files are named by.
        number: The how many-th start this is, from 1.
        display: Where messages go.
        received: Signals to the launcher are appended to it.
    """

    def __init__(
        self,
        request: Request,
        parts: Sequence[Part],
        cluster: Cluster,
        missing: Sequence[Host],
        *,
        mark: str,
        began: str,
        number: int,
        display: Display,
        received: list[int],
    ) -> None:
        self.request = request
        self.parts = parts
        self.missing = missing
        self.mark = mark
        self.display = display
        self._received = received
        self._calls: list[Connection] = []
        self._called = time.monotonic()
        self._silence = max(5.0, request.heartbeat_timeout)
        self._selector = selectors.DefaultSelector()
        options = {
            "as_is": request.as_is,
            "start_timeout": request.start_timeout,
            "heartbeat_timeout": request.heartbeat_timeout,
            "stall_timeout": request.stall_timeout,
            "grace": request.grace,
            "attempt": number,
            "began": began,
        }
        for part in parts:
            self._selector.register(part.connection.descriptor, selectors.EVENT_READ)
            part.connection.send(
                "start",
                cluster=cluster.as_dict(),
                tasks=list(part.tasks),
                command=list(request.command),
                environment=dict(request.environment),
                options=options,
            )

    def run(self) -> bool:
        """Returns True when the job is done, False when it is to be started again with a host that is back.

        Raises:
            TaskFailed: A task failed, or a host is gone.
            JobStopped: The launcher was told to stop.
        """
        try:
            while not self._done():
                self._turn()
                if self._received:
                    self._stop_as_told()
                self._look_for_failure()
                if self._is_back():
                    self._stop(signal.SIGTERM)
                    return False
            self._wait(_LAST, lambda: all(part.ended for part in self.parts))
            self._stop(signal.SIGTERM)
            return True
        finally:
            for connection in (*self._calls, *(part.connection for part in self.parts)):
                connection.close()
            self._selector.close()

    def _done(self) -> bool:
        return all(part.ended and part.ended["how"] == "done" for part in self.parts if part.trains)

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TICK):
            part = next(part for part in self.parts if part.connection.descriptor == key.fd)
            gone = part.connection.gone
            part.take()
            if gone:
                self._selector.unregister(key.fd)
        for part in self.parts:
            part.connection.beat()
        self.display.draw([row for part in self.parts for row in part.rows])

    def _look_for_failure(self) -> None:
        failed = next((p for p in self.parts if p.ended and p.ended["how"] != "done"), None)
        lost = self._lost()
        if failed is None and lost is None:
            return
        # A task fails because a host is gone, and says so before that host has been silent for long enough.
        quiet = [p for p in self.parts if not p.ended and p.connection.silent > 3 * wire.BEAT]
        if lost is None and quiet:
            self._wait(
                self._silence, lambda: self._lost() or all(p.ended or p.connection.silent < wire.BEAT for p in quiet)
            )
            lost = self._lost()
        self._stop(signal.SIGTERM)
        if lost is not None:
            raise TaskFailed(f"{lost[0]} is gone: {lost[1]}. Its tasks were {', '.join(lost[2])}.", code=1)
        if failed is not None and failed.ended is not None:
            raise TaskFailed(f"On {failed.name}: {failed.last_word}", code=int(failed.ended.get("code") or 1))

    def _lost(self) -> tuple[str, str, list[str]] | None:
        for part in self.parts:
            if not part.ended and part.connection.gone:
                part.take()  # Its last word may still be unread.
            if part.ended:
                continue
            silent = part.connection.silent
            # ssh, too, gives up after a while.
            if silent > self._silence or (part.connection.gone and silent > 3 * wire.BEAT):
                return part.name, f"nothing was heard of it for {silent:.0f} s", list(part.tasks)
            if part.connection.gone:
                return part.name, part.connection.words(), list(part.tasks)
        return None

    def _is_back(self) -> bool:
        """Calls the hosts that are missing, once in a while, when the others have come so far that it pays."""
        if not self.missing or not any(part.steps for part in self.parts):
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
                Connection(self.request, host, mark=self.mark, first=False) for host in self.missing if host not in busy
            ]
        return False

    def _stop_as_told(self) -> None:
        number = self._received[0]
        grace = self.request.grace
        self.display.say(
            f"{signal.Signals(number).name}: asking all tasks to end, {grace:g} s; once more ends them at once"
        )
        self._stop(number)
        raise JobStopped(number)

    def _stop(self, number: int) -> None:
        """Asks all tasks to end, and waits; a further signal to the launcher is handed on, and cuts it short."""
        known = len(self._received)
        left = [part for part in self.parts if not part.ended]
        for part in left:
            part.connection.send("stop", signal=int(number))
        self._wait(
            self.request.grace + _LEEWAY,
            lambda: all(self._over(part) for part in left) or len(self._received) > known,
        )
        if len(self._received) > known:
            for part in left:
                part.connection.send("stop", signal=int(number))
            self._wait(_LEEWAY, lambda: all(self._over(part) for part in left))

    def _over(self, part: Part) -> bool:
        return bool(part.ended) or part.connection.gone or part.connection.silent > self._silence

    def _wait(self, seconds: float, until: Any) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self._turn()
