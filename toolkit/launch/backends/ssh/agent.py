"""What runs on each host: it starts that host's tasks, reports on them, and ends them when the launcher is gone.

    python -m toolkit.launch.backends.ssh.agent

It reads what to do from standard input, so no shell ever sees a name, a path or a value. The end of its input, or
silence there, means that the launcher or the connection is gone: the tasks get time for a checkpoint, and are ended.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Cluster, Task
from toolkit.errors import JobStopped, RequestError, TaskFailed, ToolkitError
from toolkit.launch.backends.ssh import wire

__all__: list[str] = []

_LEEWAY = 10.0  # Seconds that ending may take beyond the grace that tasks get.


def _main() -> int:
    output = _Output()
    with open(0, "rb", buffering=0, closefd=False) as unread:  # What comes after the line stays for the thread.
        reader = wire.Reader()
        prepare = next(iter(reader.messages(unread.readline())), {})
    if prepare.get("toolkit") != "prepare":
        sys.stderr.write("error: toolkit.launch.backends.ssh.agent is started by toolkit launch --hosts, not by hand\n")
        return RequestError.exit_code
    try:
        directory = pathlib.Path(prepare["directory"]).expanduser()
        os.chdir(directory if directory.is_absolute() else pathlib.Path.home() / directory)
    except OSError as error:
        output.send("end", how="refused", text=f"{prepare['directory']} there: {(error.strerror or '').lower()}")
        return RequestError.exit_code
    from toolkit.launch.ports import HeldPorts

    with HeldPorts() as held:
        ports = [held.free() for _ in range(prepare["tasks"])]
        output.send(
            "ready",
            version=__version__,
            host=socket.gethostname(),
            ports=ports,
            shared=_shared(prepare["mark"], make=prepare["first"]),
        )
        listening = _Listening(float(prepare["silence"]), float(prepare["grace"]))
        try:
            given = listening.first()
            with contextlib.suppress(OSError):
                _probe(prepare["mark"]).unlink()
            if given is None:
                return 0
            return _run(given, held, output)
        finally:
            listening.over = True


def _run(given: dict[str, Any], held: Any, output: "_Output") -> int:
    """Runs this host's tasks; reports how they ended, and returns an exit code."""
    from toolkit import launch

    # The launcher's signals come over the connection; those of this host end the tasks, too.
    with tempfile.TemporaryDirectory(prefix="toolkit-", ignore_cleanup_errors=True) as logs:
        try:
            cluster = Cluster(given["cluster"])
            spec = launch.LaunchSpec(
                **given["options"],
                command=tuple(given["command"]),
                cluster=cluster,
                tasks=tuple(given["tasks"]),
                environment=tuple(given["environment"].items()),
                log_dir=logs,
                open_network=True,  # Looked at where the hosts are named.
            )
            launch.start(spec, display=_Display(output), ports=held)
        except JobStopped as error:
            output.send("end", how="stopped", text=str(error), code=error.exit_code, **_record(logs))
            return error.exit_code
        except TaskFailed as error:
            _send_stacks(logs, output)
            output.send("end", how="failed", text=str(error), code=error.exit_code, **_record(logs))
            return error.exit_code
        except RequestError as error:
            output.send("end", how="refused", text=str(error), code=error.exit_code)
            return error.exit_code
        except (ToolkitError, OSError) as error:
            output.send("end", how="failed", text=str(error), code=1)
            return 1
        output.send("end", how="done", text="", code=0, **_record(logs))
        return 0


def _record(logs: str) -> dict[str, Any]:
    """Returns what this host's launcher has recorded."""
    from toolkit.launch.record import FAILURE, FILE

    found: dict[str, Any] = {"logs": logs}
    with contextlib.suppress(OSError, ValueError):
        found["events"] = [json.loads(text) for text in pathlib.Path(logs, FILE).read_text("utf-8").splitlines()]
    with contextlib.suppress(OSError, ValueError):
        found["failure"] = json.loads(pathlib.Path(logs, FAILURE).read_text("utf-8"))
    return found


def _send_stacks(logs: str, output: "_Output") -> None:
    """Sends what a launcher puts into logs only: where tasks stood that made no progress."""
    from toolkit.launch.running import STACKS

    for log in sorted(pathlib.Path(logs).glob("*.log")):
        with contextlib.suppress(OSError):
            _, line, text = log.read_text("utf-8", errors="replace").partition(f"\n{STACKS}\n")
            if line:
                job, _, index = log.stem.rpartition("-")
                output.send("lines", task=f"{job}:{index}", lines=[STACKS, *text.splitlines()])


def _probe(token: str) -> pathlib.Path:
    return pathlib.Path(f".toolkit-{token}")


def _shared(token: str, *, make: bool) -> bool:
    """Returns whether this directory is the first host's own: a file lies in it while hosts are being called."""
    with contextlib.suppress(OSError):
        if make:
            _probe(token).touch()
        return _probe(token).exists()
    return False


class _Output:
    """Standard output, for messages only: what else writes there goes to standard error."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, kind: str, **facts: Any) -> None:
        """Sends a message; a connection that is gone is noticed by whoever listens."""
        view = memoryview(wire.line(kind, **facts))
        with self._lock, contextlib.suppress(OSError):
            while view:
                view = view[os.write(self._descriptor, view) :]


class _Display:
    """Sends to the launcher what its display is to show."""

    def __init__(self, output: _Output) -> None:
        self._output = output
        self._sent = 0.0

    def lines(self, task: Task, lines: Sequence[bytes]) -> None:
        if lines:
            self._output.send("lines", task=str(task), lines=[text.decode(errors="replace") for text in lines])

    def say(self, message: str) -> None:
        self._output.send("note", text=message)

    def draw(self, rows: Callable[[], Sequence[Sequence[str]]]) -> None:
        now = time.monotonic()
        if now - self._sent >= wire.BEAT:
            self._sent = now
            self._output.send("rows", rows=rows())

    def close(self) -> None:
        """Does nothing: there is no table here."""


class _Listening:
    """Reads what the launcher sends, in a thread of its own.

    Args:
        silence: Seconds without a message after which the launcher counts as gone.
        grace: Seconds that tasks get to end.
    """

    def __init__(self, silence: float, grace: float) -> None:
        self.over = False
        self._silence = silence
        self._grace = grace
        self._first: dict[str, Any] | None = None
        self._came = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def first(self) -> dict[str, Any] | None:
        """Returns the message that says what to start, None if the launcher has gone without one."""
        self._came.wait()
        return self._first

    def _listen(self) -> None:
        reader = wire.Reader()
        while True:
            ready, _, _ = select.select([0], [], [], self._silence)
            data = os.read(0, 1 << 16) if ready else b""
            if not data:
                self._end(signal.SIGTERM)
                return
            for message in reader.messages(data):
                if message["toolkit"] == "start":
                    self._first = message
                    self._came.set()
                elif message["toolkit"] == "stop":
                    self._end(message["signal"])

    def _end(self, number: int) -> None:
        started = self._first is not None
        self._came.set()
        if self.over or not started:
            return
        os.kill(os.getpid(), number)
        threading.Thread(target=self._end_for_good, daemon=True).start()

    def _end_for_good(self) -> None:
        """Writing to a connection that is gone can take for ever: whatever still runs is then ended by the guard."""
        time.sleep(self._grace + _LEEWAY)
        if not self.over:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(_main())
