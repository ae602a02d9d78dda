"""The ssh process of one host."""

import os
import shlex
import signal
import subprocess
import tempfile
import time
from typing import Any

from toolkit.launch.backends.ssh import wire
from toolkit.launch.backends.ssh.programs import ssh
from toolkit.launch.backends.ssh.spec import Host, SshSpec

__all__ = ["Connection"]


class Connection:
    """A host's agent, at the end of ssh.

    Args:
        spec: What was asked.
        host: The host.
        token: The job's own; a file of that name in the directory shows which hosts share it.
        first: Whether it is the job's first host.

    Attributes:
        ready: Its message that it is ready; None before.
        ended: Its message about its end; None before.
        refused: Why it won't be ready, in words; "" as long as it may.
    """

    def __init__(self, spec: SshSpec, host: Host, *, token: str, first: bool) -> None:
        self.host = host
        self._received = self._beat = time.monotonic()
        self.ready: dict[str, Any] | None = None
        self.ended: dict[str, Any] | None = None
        self.refused = ""
        self._reader = wire.Reader()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close().
        path = ["env", f"PYTHONPATH={spec.path}"] if spec.path else []
        # All of it is quoted for the shell that sshd starts; everything of the user's follows as JSON.
        remote = "exec " + shlex.join([*path, spec.python, "-m", "toolkit.launch.backends.ssh.agent"])
        self.process = subprocess.Popen(
            [*ssh(spec), "--", host.name, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # The terminal's Ctrl-C is passed on, so that tasks can write a checkpoint.
        )
        assert self.process.stdout is not None
        self.descriptor = self.process.stdout.fileno()
        os.set_blocking(self.descriptor, False)
        # An agent of another version reads this before versions are compared: its keys stay as they are.
        self.send(
            "prepare",
            directory=spec.directory,
            tasks=host.tasks,
            mark=token,
            first=first,
            silence=max(5.0, spec.heartbeat_timeout),
            grace=spec.grace,
        )

    def send(self, kind: str, **facts: Any) -> None:
        """Sends a message; to a host that is gone, nothing."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(wire.line(kind, **facts))
            self.process.stdin.flush()
        except (OSError, ValueError):
            pass

    def beat(self) -> None:
        """Shows the agent that this end lives, once a second."""
        now = time.monotonic()
        if now - self._beat >= wire.BEAT:
            self._beat = now
            self.send("beat")

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages that have come; notes those that this class has attributes for."""
        try:
            data = os.read(self.descriptor, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        found = self._reader.messages(data)
        if found:
            self._received = time.monotonic()
        for message in found:
            if message["toolkit"] == "ready":
                self.ready = message
            elif message["toolkit"] == "end":
                self.ended = message
                if self.ready is None:
                    self.refused = str(message["text"])
        if not data and self.ready is None and not self.refused:
            self.refused = self.last_line()
        return found

    @property
    def gone(self) -> bool:
        """Whether ssh has ended."""
        return self.process.poll() is not None

    @property
    def silence(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._received

    def last_line(self) -> str:
        """Returns what ssh or the host's shell wrote last."""
        code = self.process.wait(5) if self.gone else None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        lines = [text for text in self._errors.read().decode(errors="replace").splitlines() if text.strip()]
        lines = lines or self._reader.strange or [f"ssh ended with exit code {code}"]
        return lines[-1].strip()[:300]

    def close(self) -> None:
        """Ends ssh; the agent's input ends with it, and the tasks there soon after."""
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass
        if not self.gone:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._errors.close()
