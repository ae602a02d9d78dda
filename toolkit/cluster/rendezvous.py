"""Waiting for the other tasks, before TensorFlow does.

TensorFlow waits for a missing peer without a word, holds Python's interpreter lock meanwhile and
ignores SIGTERM. So the tasks meet first, at the addresses that TensorFlow will use: each listens on
its own, calls every other, and tells it who it is. When each has called all others, they let go of
the ports, and TensorFlow finds everybody there.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping

from toolkit import __version__
from toolkit.cluster.calls import Call, Guest, ask, listen, ports_are_shared, reason
from toolkit.cluster.program import remedy
from toolkit.cluster.spec import Cluster, Task
from toolkit.errors import ClusterError
from toolkit.support import signals, status

__all__ = ["meet"]

_LOG = logging.getLogger(__name__)
_RETRY = 0.25  # Seconds between two calls to the same peer.
_SAY_AFTER, _SAY_EVERY = 3.0, 5.0  # Seconds.
_LONGEST = 1 << 16  # Bytes of a greeting.
_NAMED = 4  # So many missing tasks are named in a message.
_GRPC = b"\x04"  # The type of the frame, SETTINGS, with which every HTTP/2 server begins; its fourth byte.


def meet(
    cluster: Cluster,
    me: Task,
    *,
    timeout: float,
    peers: Iterable[Task] | None = None,
    program: Mapping[str, str] | None = None,
) -> None:
    """Returns when every task of the cluster has reached every other.

    A task that TensorFlow already serves counts as met: it was started without this toolkit.

    Args:
        cluster: All who meet.
        me: Who this process is.
        timeout: Seconds to wait.
        peers: Whom to meet; None for all others.
        program: What this task runs, as `program.describe` says it; peers that say another are refused.

    Raises:
        ClusterError: This task's port is taken, a peer doesn't answer in time, another task or
            another cluster's answers in its place, or another process says that it is this task.
        SystemExit: A signal came that the program doesn't handle itself.
    """
    if len(cluster.tasks) > 1:
        others = [task for task in peers or cluster.tasks if task != me]
        with (
            signals.exiting(f"waiting for {', '.join(str(task) for task in others[:_NAMED])}"),
            _Meeting(cluster, me, others, program or {}) as meeting,
        ):
            meeting.hold(timeout)


class _Meeting:
    def __init__(self, cluster: Cluster, me: Task, peers: list[Task], program: Mapping[str, str]) -> None:
        self.program = program
        self.cluster = cluster
        self.me = me
        self.peers = peers
        self.reached: set[Task] = set()
        self.heard: set[Task] = set()
        self.reasons: dict[Task, str] = {}
        self.calls: dict[Task, Call] = {}
        self.process = secrets.token_hex(8)
        try:
            self.listeners = listen(cluster.address(me), me)
        except ClusterError:
            # Is it this task, started twice? Then the other process is told, too.
            self._look_for_twin(ask(cluster.address(me), self._greeting(me)))
            raise
        self.selector = selectors.DefaultSelector()
        for listener in self.listeners:
            self.selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()

    def hold(self, timeout: float) -> None:
        began = said = time.monotonic()
        # Where ports are shared, a call to oneself may reach a twin; else the twin can't have the port.
        called = [*self.peers, self.me] if ports_are_shared() else self.peers
        due = dict.fromkeys(called, began)
        while missing := [task for task in self.peers if not {task} <= self.reached & self.heard]:
            now = time.monotonic()
            if now - began > timeout:
                raise self._absent(missing, timeout)
            if now - began > _SAY_AFTER and now - said > _SAY_EVERY:
                said = now
                words = self._words(missing)
                _LOG.warning("waiting for %s, %.0f s", words, now - began)
                status.report(state=f"waiting for {', '.join(str(task) for task in missing[:_NAMED])}")
            for task in called:
                if task not in self.reached and task not in self.calls and due[task] <= now:
                    due[task] = now + _RETRY
                    self._call(task)
            for task, call in list(self.calls.items()):
                if call.late(now):
                    self._hang_up(task, "no answer")
            for key, _ in self.selector.select(0.05):
                if isinstance(key.data, Call):
                    self._answered(key.data)
                elif isinstance(key.data, Guest):
                    self._listen_to(key.data)
                else:
                    self._welcome(key.fileobj)  # type: ignore[arg-type]

    def _greeting(self, to: Task | None) -> bytes:
        facts = {
            "toolkit": __version__,
            "task": str(self.me),
            "to": str(to) if to else None,
            "cluster": self.cluster.digest,
            "program": dict(self.program),
            "process": self.process,
        }
        return json.dumps(facts).encode() + b"\n"

    def _call(self, task: Task) -> None:
        try:
            call = Call(task, self.cluster.address(task))
        except OSError as error:
            self.reasons[task] = reason(error)
            return
        self.calls[task] = call
        self.selector.register(call.socket, selectors.EVENT_WRITE, call)

    def _answered(self, call: "Call") -> None:
        try:
            if not call.greeted:
                error = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                call.socket.send(self._greeting(call.task))
                call.greeted = True
                self.selector.modify(call.socket, selectors.EVENT_READ, call)
                return
            received = call.socket.recv(_LONGEST)
        except OSError as error:
            self._hang_up(call.task, reason(error))
            return
        call.text += received
        if call.text[3:4] == _GRPC and call.text[:1] == b"\0":
            self.heard.add(call.task)  # TensorFlow's own server: it will not call.
            self.reached.add(call.task)
            self._hang_up(call.task, "")
        elif b"\n" in call.text or not received or len(call.text) > _LONGEST:
            if call.task == self.me:
                self._look_for_twin(call.text)
            self._hang_up(call.task, "" if call.task == self.me else self._judge(call))

    def _look_for_twin(self, text: bytes) -> None:
        """Refuses to be one of two processes that are the same task, given what a process says of itself."""
        try:
            facts = json.loads(text)
            same = facts["task"] == str(self.me) and facts["cluster"] == self.cluster.digest
            twin = same and facts["process"] != self.process
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if twin:
            raise ClusterError(
                asked=f"this process is to be {self.me}",
                found="another one says that it is, too",
                remedy="Give each process its own index, and end what is left of earlier jobs",
            )

    def _judge(self, call: "Call") -> str:
        """Says what is wrong with an answer; "" for nothing."""
        try:
            facts = json.loads(call.text)
            name, digest = facts["task"], facts["cluster"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return "what answers there is no task of this job"
        address = self.cluster.address(call.task)
        if digest != self.cluster.digest:
            raise ClusterError(
                asked=f"{self.me} looks for {call.task} at {address}",
                found=f"{name} of a differently described cluster answers there",
                remedy="Give every task the same cluster, in the same order, and end what is left of earlier jobs",
            )
        if name != str(call.task):
            raise ClusterError(
                asked=f"{self.me} looks for {call.task} at {address}",
                found=f"the task there says that it is {name}",
                remedy="Give each process its own index, and each task its own address",
            )
        self._check_program(name, facts.get("program"))
        self.reached.add(call.task)
        return ""

    def _check_program(self, other: str, theirs: object) -> None:
        """Both ends of a call look, so both say it."""
        if not isinstance(theirs, dict):
            return
        differ = [key for key, mine in self.program.items() if theirs.get(key, mine) != mine]
        if differ:
            key = differ[0]
            mine, yours = self.program[key], str(theirs[key])[:500]
            raise ClusterError(
                asked=f"{self.me} and {other} are to run the same program",
                found=f"their {key} differ: {mine or 'none'} here, {yours or 'none'} there",
                remedy=remedy(key),
            )

    def _hang_up(self, task: Task, reason: str) -> None:
        call = self.calls.pop(task)
        self.selector.unregister(call.socket)
        call.socket.close()
        self.reasons[task] = reason

    def _welcome(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, Guest(connection))

    def _listen_to(self, guest: "Guest") -> None:
        known = None
        try:
            received = guest.socket.recv(_LONGEST)
            guest.text += received
            if received and b"\n" not in guest.text and len(guest.text) <= _LONGEST:
                return
            facts = json.loads(guest.text)
            task = Task.parse(str(facts["task"]))
            guest.socket.send(self._greeting(None))
            if facts["cluster"] == self.cluster.digest and facts["to"] == str(self.me) and task in self.peers:
                self.heard.add(task)
                known = task
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ClusterError):
            pass  # A stranger, or a peer that will call again.
        self.selector.unregister(guest.socket)
        guest.socket.close()
        self._look_for_twin(guest.text)
        if known is not None:
            self._check_program(str(known), facts.get("program"))

    def _words(self, missing: Iterable[Task]) -> str:
        missing = list(missing)
        words = []
        for task in missing[:_NAMED]:
            reason = self.reasons.get(task) or ("it hasn't called back" if task in self.reached else "no answer yet")
            words.append(f"{task} at {self.cluster.address(task)} ({reason})")
        rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return ", ".join(words) + rest

    def _absent(self, missing: list[Task], timeout: float) -> ClusterError:
        return ClusterError(
            asked=f"{self.me} waited {timeout:.0f} s for the {len(self.peers)} other tasks of the cluster",
            found=f"{len(missing)} could not be met: {self._words(missing)}",
            remedy="Start every task with the same cluster, check names, ports and firewalls, or wait longer",
        )
