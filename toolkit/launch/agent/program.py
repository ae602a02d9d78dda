"""The agent: starts, signals and watches the tasks of one machine for its supervisor, and reports events.

    python -m toolkit.launch.agent.program

What it is asked for comes as lines of JSON on standard input, so no shell ever sees a name, a path or a value, and what
happens goes to standard output. The end of its input, or silence there, means that the supervisor or the connection is
gone: the tasks get time for a checkpoint, and are ended. When the process itself ends, in whatever way, so do they, and
whatever they leave behind falls to it.
"""

import base64
import contextlib
import functools
import json
import os
import pathlib
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Cluster, Task
from toolkit.errors import LaunchError, RequestError
from toolkit.launch import checks, events, nccl
from toolkit.launch.agent.connection import Channel, ConnectedAgent
from toolkit.launch.agent.ports import HeldPorts, open_ports
from toolkit.launch.agent.process import TaskProcess, end_descendants, files_waited_for
from toolkit.launch.agent.tasks import TaskSpec, task_specs
from toolkit.launch.events import Event, event
from toolkit.support import signals, source_lines, status

_ASKED_EVERY = 5.0  # Seconds between two questions.
_LONGEST_QUESTION = 30.0  # Seconds after which a command that hasn't answered is ended, which is no notice.
_NOT_RUN = (126, 127)  # A shell's exit codes for a program that it can't start or find.
_LONGEST_REPORT = 1 << 16  # The most bytes in a report.
_REPORTS = 1000  # The most reports that are read of one task before others'.
_NO_REPORT = (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError)  # Not from a task.
_MOST_WAITING = 1024  # The most connections that may wait to be accepted.
_ASKED = ("prepare", "start", "again", "signal", "kill", "stacks", "nccl", "look", "finish", "beat")
_AT_ONCE = 50  # How many processes are sampled per second. With more processes, each is sampled less often.
_PIECE = 1 << 20  # Bytes of a function's result in one event.
_TIMED = ("started", "ended", "report", "sample", "preempted")  # Events whose order counts among hosts.
_ANSWER = 3.0  # Seconds to wait for stacks.
_TICK = 0.05
_FIRST = 60.0  # Seconds in which the first request must arrive.


class Preemption:
    """A command whose exit code 0 means that this machine is about to be taken away.

    Args:
        command: For `sh -c`.
        environ: Its environment.

    Raises:
        LaunchError: A shell can't read it.
    """

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._process: subprocess.Popen | None = None
        self._began = -_ASKED_EVERY
        self._answered = False
        read = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        if read.returncode:
            raise self._fault(f"a shell can't read it ({read.stderr.strip()[-200:]})")

    def _fault(self, found: str) -> LaunchError:
        return LaunchError(
            asked=f"--preempt_when={self._command[:60]!r} is asked whether {socket.gethostname()} is taken away",
            found=found,
            remedy="Try it in a shell on that machine: exit code 0 means notice, and any other code means none",
        )

    def noticed(self) -> bool:
        """Asks again when it is time; returns whether the last answer is notice.

        Raises:
            LaunchError: The first question shows that the command can't be run.
        """
        now = time.monotonic()
        if self._process is None:
            if now - self._began >= _ASKED_EVERY:
                self._began = now
                self._process = subprocess.Popen(
                    ["sh", "-c", self._command],
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            return False
        code = self._process.poll()
        if code is None:
            if now - self._began > _LONGEST_QUESTION:
                self.close()
            return False
        self._process = None
        first, self._answered = not self._answered, True
        if first and code in _NOT_RUN:
            raise self._fault(f"a shell can't run it (exit code {code})")
        return code == 0

    def close(self) -> None:
        """Ends the command if it runs."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class Reports:
    """A Unix socket that tasks connect to. Reports arrive whole and in order, and none is lost while this object lives.

    Args:
        selector: Its keys hold functions, which are called when there is something to read.
        take: Is given each report.

    Attributes:
        scratch: A new directory for it and for what else goes with the job.
        path: Where the socket is.
    """

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[dict[str, Any]], None]) -> None:
        self._selector = selector
        self._take = take
        # A Unix socket's path may have about 100 characters, so a temporary directory with a longer path isn't used.
        short = "/tmp" if len(tempfile.gettempdir()) > 60 and sys.platform != "win32" else None
        self._directory = tempfile.TemporaryDirectory(prefix="toolkit-", dir=short, ignore_cleanup_errors=True)
        self.scratch = self._directory.name
        self.path = os.path.join(self.scratch, "status")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def hang_up(self) -> None:
        """Closes the connections of tasks that have ended."""
        for connection in self._connections:
            self._selector.unregister(connection)
            connection.close()
        self._connections = set()

    def close(self) -> None:
        """Closes all connections and removes the directory."""
        self.hang_up()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # As where descriptors are used up: the task waits, and this process doesn't spin.
            time.sleep(_TICK)
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        """Reads what has come over one connection, up to a limit: others have their turn, too."""
        try:
            for _ in range(_REPORTS):
                message = connection.recv(_LONGEST_REPORT)
                if not message:
                    break
                with contextlib.suppress(*_NO_REPORT):
                    self._take(json.loads(message))
            else:
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()


class Agent:
    """The tasks of this machine.

    What it is asked for is a method's name without its underscore: see `toolkit.launch.events`.

    Attributes:
        gone: False: this end of a connection is always there.
    """

    gone = False

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._held = HeldPorts()
        self._selector = selectors.DefaultSelector()
        self._reports = Reports(self._selector, self._take_report)
        signals.adopt_orphans()
        self._processes: dict[str, TaskProcess] = {}
        self._replaced: list[TaskProcess] = []
        self._specs: dict[str, TaskSpec] = {}
        self._events: list[Event] = []
        self._latest: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        self._looked = self._asked_for_stacks = 0.0
        self._looked_at_ports = False
        self._mark: pathlib.Path | None = None
        self._call: pathlib.Path | None = None
        self._preemption: Preemption | None = None
        self._question: nccl.Question | None = None

    def fileno(self) -> int:
        """A descriptor that can be read when something has happened."""
        return self._selector.fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Carries out a request; a request that fails becomes an event."""
        if kind not in _ASKED:  # A request of a later version.
            return
        with self._refusing():
            getattr(self, f"_{kind}")(**facts)

    def read(self, *, silent: bool = False) -> list[Event]:
        """Returns the events since the last call.

        Args:
            silent: Leave what the tasks have written where it is: they wait when they write more than a pipe holds.
        """
        for key, _ in self._selector.select(0):
            if not (silent and isinstance(key.data, functools.partial) and key.data.func == self._output):
                key.data()
        now = time.monotonic()
        for name, process in self._processes.items():
            if process.poll():
                self._tell_result(process)
                self._tell("ended", task=name, pid=process.pid, code=process.code)
                self._tell_left(process.left if process.code == 0 else [])
        if now - self._looked > max(events.BEAT, len(self._processes) / _AT_ONCE):
            self._look()
        if now - self._asked_for_stacks < _ANSWER:
            for name, process in self._processes.items():
                if found := process.new_stacks():
                    noted = source_lines.file_of(self._reports.path, name)
                    self._tell("stacks", task=name, text=source_lines.as_written(found, noted))
        if self._question is not None and not self._question.is_alive():
            self._tell("nccl", text=self._question.answer)
            self._question = None
        self._look_for_notice()
        happened, self._events = self._events, []
        return happened

    def close(self) -> None:
        """Kills the tasks that still run."""
        self._finish()
        self._reports.close()
        self._held.close()
        self._selector.close()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self._tell("refused", asked=error.asked, found=error.found, remedy=error.remedy)

    def _look_for_notice(self) -> None:
        """Tells once that this machine is about to be taken away."""
        if self._preemption is not None:
            with self._refusing():
                if self._preemption.noticed():
                    self._tell("preempted")
                    self._preemption = None

    def _tell(self, kind: str, **facts: Any) -> None:
        when = {"sent": time.monotonic()} if kind in _TIMED else {}
        self._events.append(event(kind, **when, **facts))

    def _tell_result(self, process: TaskProcess) -> None:
        """Sends the result of a function that ran in place of a script."""
        if self._call is not None:
            left = self._call.with_name(f"{self._call.name}.{process.spec.file_name}")
            with contextlib.suppress(FileNotFoundError):
                with left.open("rb") as file:  # In pieces, because the other side reads a line of JSON as a whole.
                    while piece := file.read(_PIECE):
                        self._tell("result", task=str(process.task), data=base64.b64encode(piece).decode())
                self._tell("result", task=str(process.task), data="")
                left.unlink()

    def _prepare(
        self,
        number: int,
        command: Sequence[str],
        given: Mapping[str, int] | None = None,
        mark: str = "",
        first: bool = False,
        **_: Any,
    ) -> None:
        """Reserves ports for this many tasks, or the given ports."""
        checks.script(command, where=f" on {socket.gethostname()}" if mark else "")
        for task, port in (given or {}).items():
            self._held.given(port, task=task)
        ports = [] if given else [self._held.free() for _ in range(number)]
        shared = False
        if mark:  # Hosts share a directory if they see the file that the first of them makes there.
            self._mark = pathlib.Path(f".toolkit-{mark}")
            with contextlib.suppress(OSError):
                if first:
                    self._mark.touch()
                shared = self._mark.exists()
        ready = {"version": __version__, "host": socket.gethostname(), "ports": ports, "scratch": self._reports.scratch}
        self._tell("ready", **ready, shared=shared)

    def _start(
        self,
        cluster: Mapping[str, Any],
        tasks: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str],
        options: Mapping[str, Any],
        job_id: str,
        attempt: int,
        logs: str,
        call: str = "",
        prefix: Sequence[str] = (),
        preempt_when: str = "",
        **_: Any,
    ) -> None:
        """Starts tasks. Those of an earlier attempt must have ended."""
        if self._mark:
            with contextlib.suppress(OSError):
                self._mark.unlink()
        self._clear()
        own = {status.ATTEMPT: str(attempt), status.LOGS: logs}
        self._call = pathlib.Path(self._reports.scratch, "call.pkl") if call else None
        if self._call is not None:
            self._call.write_bytes(base64.b64decode(call))
            own[status.CALL] = str(self._call)
        self._environment = {**os.environ, **environment, **own}
        self._preemption = Preemption(preempt_when, {**os.environ, **environment}) if preempt_when else None
        specs, note = task_specs(
            Cluster(cluster),
            [Task.parse(name) for name in tasks],
            command=command,
            prefix=prefix,
            environ=self._environment,
            settings={
                status.JOB_ID: job_id,
                status.START_TIMEOUT: f"{options['start_timeout']:g}",
                status.SPENT: json.dumps(options.get("spent", {})),
                status.HEARTBEAT_TIMEOUT: f"{options['heartbeat_timeout']:g}",
                status.GRACE: f"{options['grace']:g}",
            },
            as_is=options["as_is"],
            partial=options["partial"],
            socket_path=self._reports.path,
        )
        if note:
            self._tell("note", text=note)
        self._specs = {str(spec.task): spec for spec in specs}
        for name in self._specs:
            self._again(name)

    def _again(self, task: str, **_: Any) -> None:
        """Starts one task, perhaps in place of a task that has ended."""
        spec = self._specs[task]
        if task in self._processes:
            self._replaced.append(self._processes.pop(task))
        stacks = pathlib.Path(self._reports.scratch, f"{spec.file_name}.stacks")
        pathlib.Path(status.phase_file(self._reports.path, task)).unlink(missing_ok=True)  # Of the process before.
        process = TaskProcess(spec, environ=self._environment, stacks=stacks)
        self._processes[task] = process
        self._states.pop(task, None)
        self._selector.register(process.descriptor, selectors.EVENT_READ, functools.partial(self._output, process))
        self._tell("started", task=task, pid=process.pid)

    def _signal(self, number: int, task: str | None = None, **_: Any) -> None:
        for process in self._chosen(task):
            # While Python is still starting, Ctrl-C would print pages of tracebacks from its own imports.
            begun = str(process.task) in self._states
            process.signal(number if begun or number != signal.SIGINT else signal.SIGTERM)

    def _kill(self, task: str | None = None, **_: Any) -> None:
        for process in self._chosen(task):
            process.kill()

    def _stacks(self, **_: Any) -> None:
        """Has tasks write their Python stacks; this works even if TensorFlow holds the interpreter lock."""
        self._asked_for_stacks = time.monotonic()
        for name in self._states:  # Before the task is ready, the signal would end it.
            self._processes[name].signal(signal.SIGUSR1)
            for path in files_waited_for(self._processes[name].main):
                self._tell("stacks", task=name, text=f"{events.WAITS}{path}\n")

    def _nccl(self, **_: Any) -> None:
        self._question = self._question or nccl.Question(self._environment)

    def _look(self, number: int | None = None, **_: Any) -> None:
        """Reports each process's state, and the steps reported since the last time; and that it was asked to."""
        self._looked = time.monotonic()
        for name, facts in self._latest.items():
            self._tell("report", task=name, facts=facts, ago=0.0)
        self._latest = {}
        for name, process in self._processes.items():
            if process.code is None:
                self._tell("sample", task=name, phase=self._phase(name), **process.sample())
        if number is not None:
            self._tell("looked", number=number)

    def _phase(self, name: str) -> dict[str, Any] | None:
        found = status.read_phase(status.phase_file(self._reports.path, name))
        return found if found and self._processes[name].is_main(found["pid"]) else None

    def _finish(self, **_: Any) -> None:
        """Kills the tasks that still run, and all processes that they left behind."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        for process in self._processes.values():
            process.kill()
        left = end_descendants(but={process.pid for process in (*self._processes.values(), *self._replaced)})
        self._tell_left(left if all(process.code == 0 for process in self._processes.values()) else [])

    def _tell_left(self, programs: Sequence[str]) -> None:
        if programs:
            names = ", ".join(sorted(set(programs))[:4])
            self._tell("note", text=f"note: {names} still ran when the script had ended, and was ended, too")

    def _beat(self, **_: Any) -> None:
        """The supervisor is alive."""

    def _clear(self) -> None:
        self._finish()
        for process in (*self._processes.values(), *self._replaced):
            if not process.ended:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(process.descriptor)
            process.close()
        self._reports.hang_up()
        self._processes, self._replaced, self._states, self._latest = {}, [], {}, {}

    def _chosen(self, task: str | None) -> list[TaskProcess]:
        return [process for name, process in self._processes.items() if task in (None, name)]

    def _output(self, process: TaskProcess) -> None:
        name = str(process.task)
        written = process.read()
        if written:
            self._tell("output", task=name, text=events.text(written))
        if process.ended:
            self._selector.unregister(process.descriptor)
            if self._processes.get(name) is process:
                self._tell("output", task=name, text="")

    def _take_report(self, facts: Mapping[str, Any]) -> None:
        name = facts["task"]
        if name not in self._processes or not self._processes[name].is_main(facts.get("pid")):
            return  # A child process of the task.
        news = facts.get("state", "") != self._states.get(name, "")
        self._states[name] = facts.get("state", self._states.get(name, ""))
        if not news:  # Of reported steps only the last counts, once a second.
            self._latest[name] = {**self._latest.get(name, {}), **facts}
            return
        facts = {**self._latest.pop(name, {}), **facts}
        ago = max(0.0, time.monotonic() - float(facts["at"])) if "at" in facts else 0.0
        self._tell("report", task=name, facts=facts, ago=ago)
        if not self._looked_at_ports and ("strategy" in facts or facts.get("state") == "serving"):
            self._looked_at_ports = True
            found = open_ports({n: p.pid for n, p in self._processes.items() if p.code is None})
            if found is not None:
                self._tell("open", ports=found[0], addresses=found[1])


def serve(
    agent: Agent | ConnectedAgent,
    channel: Channel,
    received: Sequence[int],
    asked: Sequence[Event] = (),
    *,
    silence: float,
    grace: float,
    seen: Callable[[Event], object] = lambda _: None,
    own: dict | None = None,
) -> Event | None:
    """Serves requests until the connection ends; the tasks then get time to end.

    Args:
        agent: Does it; it has been asked to prepare.
        channel: The connection to the supervisor.
        received: Signals to this process are appended to it.
        asked: What has come with the request to prepare.
        silence: Seconds after which the supervisor counts as gone.
        grace: Seconds that the tasks then get to end.
        seen: Is given each event, too.
        own: What takes the place of such facts where tasks are to be started.

    Returns:
        The supervisor's last word; None where it, or the connection, is gone without one.
    """
    ends, sent = float("inf"), 0
    alive: set[str] = set()
    over: Event | None = None
    while True:
        for message in asked:
            if message["event"] == "over":
                over = message
            else:
                facts = {**message, **((own or {}) if message["event"] == "start" else {})}
                agent.send(facts.pop("event"), **facts)
        found = agent.read(silent=channel.full)
        if agent.gone:
            return over
        for each in found:
            if each["event"] == "started":
                alive.add(each["task"])
            elif each["event"] == "ended":
                alive.discard(each["task"])
            seen(each)
        found += [event("signal", number=int(number)) for number in received[sent:]]
        sent = len(received)
        channel.send(*found)
        now = time.monotonic()
        if now > ends or ((over or ends < float("inf")) and not alive):
            return over
        waits = [agent.fileno(), *([channel.fileno()] if ends == float("inf") else [])]
        if channel.full:
            time.sleep(_TICK / 10)
        else:
            select.select(waits, [], [], _TICK)
        asked = channel.read()
        if ends == float("inf") and (channel.ended or channel.silence > silence):
            # If the other side was only suspended, it reads this later.
            channel.send(event("unheard", seconds=round(channel.silence)))
            agent.send("signal", number=int(signal.SIGTERM))
            ends = now + grace


def _main() -> int:
    writing = os.dup(1)
    os.dup2(2, 1)  # Anything else on standard output would not be an event.
    channel = Channel(0, writing)
    asked: list[Event] = []
    while not asked and not channel.ended and channel.silence < _FIRST:
        select.select([channel], [], [], 1.0)
        asked = channel.read()
    if not asked or asked[0]["event"] != "prepare":
        sys.stderr.write("error: toolkit.launch.agent.program is started by toolkit launch, not by hand\n")
        return RequestError.exit_code
    prepare = dict(asked[0])
    try:
        directory = pathlib.Path(prepare["directory"]).expanduser()
        os.chdir(directory if directory.is_absolute() else pathlib.Path.home() / directory)
    except OSError as error:
        why = f"can't enter the directory {prepare['directory']}: {(error.strerror or '').lower()}"
        channel.send(event("refused", asked="", found=why, remedy=""))
        return RequestError.exit_code
    with signals.recorded() as received, signals.waiting_for_children():
        agent = Agent()
        try:
            for message in asked:
                agent.send(message.pop("event"), **message)
            serve(agent, channel, received, silence=prepare["silence"], grace=prepare["grace"])
        finally:
            agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
