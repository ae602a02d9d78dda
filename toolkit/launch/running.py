"""A task that has been started."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from toolkit.launch.activity import Activity
from toolkit.launch.masking import Masker
from toolkit.launch.output import Output
from toolkit.launch.stacks import Location, locate
from toolkit.launch.tasks import TaskSpec
from toolkit.support import status

__all__ = ["STACKS", "RunningTask"]

STACKS = "--- Python stacks, asked for by the launcher ---"  # A line of a log, before them.


class RunningTask:
    """One process and its process group.

    Args:
        spec: What to start.
        environ: The launcher's environment.
        log: The task's log file.
        stacks: A file for its stacks, removed with the job.
        masker: Masks secrets in what it writes.

    Attributes:
        code: Exit code as Popen has it, None while it runs.
        done_at: When its script had come to its end, by the monotonic clock.
        failed_at: When it reported that it fails, or was seen to have, by the monotonic clock.
        facts: What it reported last: state, step, images_per_second.
        progressed: When it last did anything that can be seen.
        served: Whether it has reported that it serves a chief.
        given_up: Whether the job goes on without it.
        asked_to_end: Whether the launcher has asked it to end.
        found_stopped: Whether it was found stopped when another failed.
    """

    def __init__(
        self,
        spec: TaskSpec,
        *,
        environ: Mapping[str, str],
        log: pathlib.Path,
        stacks: pathlib.Path,
        masker: Masker,
    ) -> None:
        self.spec = spec
        self.task = spec.task
        self.started = self.progressed = time.monotonic()
        self.ended: float | None = None
        self.code: int | None = None
        self.done_at: float | None = None
        self.failed_at: float | None = None
        self.facts: dict[str, Any] = {"state": "starting"}
        self.served = self.given_up = self.asked_to_end = self.found_stopped = False
        self._stacks = stacks
        self._activity = Activity()
        self._patience = float(spec.environment.get(status.HEARTBEAT_TIMEOUT, status.SECONDS_OF_SILENCE))
        self._looked = 0.0
        self._stopped_since: float | None = None
        self._watched: Any = None
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            self.process = subprocess.Popen(
                spec.arguments(str(stacks)),
                env={**environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # Its own process group, ended as a whole; the terminal's Ctrl-C is passed on.
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.output = Output(reading, log, masker)

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as `poll` has seen."""
        return self.code is None

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP, SIGTSTP or a debugger holds it."""
        import psutil

        with contextlib.suppress(psutil.Error):
            return self.alive and self._watch().status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def frozen(self) -> bool:
        """Looks, once a second, whether it has been stopped for longer than its heartbeat may be missing."""
        now = time.monotonic()
        if now - self._looked > 1:
            self._looked = now
            self._stopped_since = (self._stopped_since or now) if self.stopped else None
        return self.alive and self._stopped_since is not None and now - self._stopped_since > self._patience

    def poll(self) -> bool:
        """Looks whether it has ended; returns True the first time that it has."""
        if self.code is not None or not self._has_ended():
            return False
        self.code = self.process.returncode
        self.ended = time.monotonic()
        if self.code != 0:
            self.failed_at = min(self.failed_at or self.ended, self.ended)
        return True

    def _has_ended(self) -> bool:
        """Looks, and ends what the task leaves in its group, while the group's number is still its own."""
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def take_report(self, facts: Mapping[str, Any]) -> None:
        """Takes what the task reports; reports of its own children don't count."""
        if facts.get("pid") != self.process.pid:
            return
        if facts.get("state") == "ending":
            self.done_at = self.done_at or time.monotonic()
        if facts.get("state") == "failed":
            self.failed_at = self.failed_at or float(facts.get("at", time.monotonic()))
        self.facts.update(facts)
        self.served = self.served or facts.get("state") == "serving"
        self.progressed = time.monotonic()

    def worked(self) -> None:
        """Counts computing as progress for a task that never reports a step."""
        if "step" in self.facts or not self.alive:
            return
        import psutil

        with contextlib.suppress(psutil.Error):
            if self._activity.computes(sum(self._watch().cpu_times()[:2])):
                self.progressed = time.monotonic()

    def row(self) -> tuple[str, ...]:
        """Returns what the table shows: task, state, pid, step, images a second, CPU in percent of one core, memory."""
        import psutil

        rate, step = self.facts.get("images_per_second"), self.facts.get("step")
        cpu = memory = ""
        if self.alive:
            with contextlib.suppress(psutil.Error):
                watched = self._watch()
                cpu, memory = f"{watched.cpu_percent():.0f} %", f"{watched.memory_info().rss / 2**20:,.0f} MiB"
        return (
            str(self.task),
            str(self.facts["state"]) if self.alive else self.words(),
            str(self.process.pid),
            "" if step is None else str(step),
            f"{rate:,.0f}" if rate else "",
            cpu,
            memory,
        )

    def _watch(self) -> Any:
        import psutil

        # Made once: both are asked for many times a second.
        self._watched = self._watched or psutil.Process(self.process.pid)
        return self._watched

    def signal(self, number: int) -> None:
        """Signals the task itself, which knows what to do with processes of its own."""
        if self.alive:
            # Not by Popen, which would wait for one that has just ended, before its end has been looked at.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends the whole process group; of a task that has ended, nothing is left."""
        if not self.alive:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask_for_stacks(self) -> None:
        """Has the task write its Python stacks; it answers even if TensorFlow holds the interpreter lock."""
        if self.facts["state"] != "starting":  # Before it is ready the signal would end it.
            self.signal(signal.SIGUSR1)

    def stacks(self) -> Location | None:
        """Puts the stacks that it wrote into its log, and returns where its main thread is."""
        try:
            text = self._stacks.read_text(errors="replace")
        except OSError:
            return None
        if text:
            self.output.write(f"\n{STACKS}\n{text}\n".encode())
        return locate(text)

    def words(self) -> str:
        """Returns how it ended, in words."""
        if self.found_stopped:
            return "was stopped by a signal, SIGSTOP or the like"
        if self.code is None:
            return "still runs"
        if self.code < 0:
            return f"was ended by {_name(-self.code)}"
        return f"ended with exit code {self.code}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
