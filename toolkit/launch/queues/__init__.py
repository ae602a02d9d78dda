"""The queues that a job can be submitted to, each a `Queue` in its own file.

Come here to change what one of them is asked for and how, or to add one: a file beside these, named as `--on` takes it,
with its class as QUEUE. Nothing else names a queue.
"""

import functools
import importlib
import pathlib
import pkgutil
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit.errors import LaunchError

__all__ = ["Queue", "every", "find", "names"]


class Queue:
    """A queue: how a job is submitted, asked after, cancelled and queued again, and what it says to the job.

    The batch script runs `toolkit.launch.backends.allocation`, which supervises the job inside what the queue gave it.

    Attributes:
        name: In sentences.
        submits: The program that submits.
        asks: The program that answers questions.
        own: Options of the program that submits which are flags of `toolkit launch` by their own names.
        starts: The program that starts one launcher on each node.
        alive: The words of `state` for a job that runs or will run.
        notices: Signals to the batch script that announce the end of its time.
        stops: Signals to the batch script that end the job.
        asks_where: The signal to the batch script that asks for the tasks' stacks; None if the queue can't pass one on.
        cleaned: Seconds after which a job that is queued again may start.
    """

    name: ClassVar[str]
    submits: ClassVar[str]
    asks: ClassVar[str]
    starts: ClassVar[str]
    own: ClassVar[tuple[str, ...]] = ()
    alive: ClassVar[tuple[str, ...]] = ("PENDING", "RUNNING", "UNKNOWN")
    notices: ClassVar[tuple[int, ...]] = (signal.SIGUSR1,)
    stops: ClassVar[tuple[int, ...]] = (signal.SIGTERM, signal.SIGINT)
    asks_where: ClassVar[int | None] = signal.SIGUSR2
    cleaned: ClassVar[float] = 15.0

    # Before the job is submitted.

    def check(self, spec: Any) -> None:
        """Checks what is asked of this queue; the queue itself checks the rest.

        Raises:
            LaunchError: It can't be.
        """

    def directives(self, spec: Any, rooms: Sequence[int]) -> list[str]:
        """Returns the lines of the batch script that say what the job needs.

        Args:
            spec: A JobSpec.
            rooms: How many tasks run on each node.
        """
        raise NotImplementedError

    def submission(self, batch: pathlib.Path, output: pathlib.Path) -> list[str]:
        """Returns the command that submits a batch script and prints the job's number.

        Args:
            batch: The script.
            output: The file for what it writes; a job that is queued again appends to it.
        """
        raise NotImplementedError

    def unfit(self, directory: str) -> str:  # noqa: ARG002 - for queues that read some characters in their own way.
        """Returns why the queue couldn't write to a file in this directory; "" if it can."""
        return ""

    def submit(self, batch: pathlib.Path, output: pathlib.Path) -> str:
        """Submits a batch script, and returns the job's number.

        Args:
            batch: The script.
            output: As for `submission`.

        Raises:
            LaunchError: The queue doesn't take the job.
        """
        # In its own session: a Ctrl-C that also reached the program could leave a job that no one knows.
        done = subprocess.run(
            self.submission(batch, output), capture_output=True, text=True, check=False, start_new_session=True
        )
        if done.returncode:
            raise LaunchError(
                asked=f"--on={self.place} submits a job",
                found=f"{self.submits} refused it: {self.refusal(done.stderr or done.stdout)}",
                remedy="See what it says; --dry_run prints the script",
            )
        return self.number_in(done.stdout)

    def refusal(self, said: str) -> str:
        """Returns what the program that submits has said, in a line."""
        return (said.strip().splitlines() or ["it wrote nothing"])[-1]

    def number_in(self, said: str) -> str:
        """Returns the job's number, of what the program that submits has printed."""
        return said.strip()

    # While it is submitted, from any machine that has the queue's programs.

    def state(self, job: str) -> tuple[str, int]:
        """Returns a job's state, "PENDING" before it runs, and its exit code: 128 + the number of a signal."""
        raise NotImplementedError

    def stop(self, job: str) -> None:
        """Asks a job's supervisor to end it; the second time, at once. A pending job is cancelled."""
        raise NotImplementedError

    def ask_where(self, job: str) -> None:
        """Asks a job's supervisor for the tasks' Python stacks.

        Raises:
            LaunchError: The queue passes no such question on.
        """
        raise LaunchError(
            asked=f"the stacks of {self.name} job {job}",
            found=f"{self.name} passes no question on to a job that runs",
            remedy="See the tasks' logs; they have the stacks of a job that hangs",
        )

    def start_now(self, job: str) -> None:
        """Makes a job that is queued again start as soon as there is room, if the queue would wait."""

    # In the job, on the node of its batch script.

    def own_number(self, environ: Mapping[str, str]) -> str:
        """Returns the number of the job that this process is in."""
        raise NotImplementedError

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of the job's nodes, that of the batch script first."""
        raise NotImplementedError

    def on_node(self, node: str, command: Sequence[str]) -> list[str]:
        """Returns what starts a program on a node, its standard input and output here."""
        raise NotImplementedError

    def nodes_answer(self, environ: Mapping[str, str], within: float) -> bool:
        """Whether every node of the job can start a program within so many seconds."""
        raise NotImplementedError

    def clock(self, spec: Any) -> float | None:  # noqa: ARG002 - for queues that say nothing in time.
        """Returns seconds after which the job's time is nearly up; None where the queue tells that by a signal."""
        return None

    def requeue(self, job: str) -> int | None:
        """Queues the job again that this process supervises.

        Returns:
            The exit code by which the batch script asks for it; None where the queue now ends the script by a signal.

        Raises:
            LaunchError: It can't be queued again.
        """
        raise NotImplementedError

    def cancelled(self, job: str) -> None:
        """Makes a job that was told to stop count as cancelled, and ends what is left of it."""

    def numbers(
        self,
        environ: Mapping[str, str],  # noqa: ARG002 - as below.
        ranks: Mapping[str, int],  # noqa: ARG002 - for queues that number the processes that they start.
    ) -> dict[str, str]:
        """Returns the variables that a task would have if the queue had started it itself.

        Args:
            environ: Those of the task's agent.
            ranks: "task": its number among all; "local": on its node; "node": the node's; and "tasks", "nodes": how
                many there are.
        """
        return {}

    # The same for all queues.

    @property
    def place(self) -> str:
        """What `--on` takes for it: the name of its file."""
        return type(self).__module__.rpartition(".")[2]

    def script(self, spec: Any, rooms: Sequence[int], about: Sequence[str], command: Sequence[str]) -> str:
        """Returns the batch script.

        Args:
            spec: A JobSpec.
            rooms: As for `directives`.
            about: Comments.
            command: What it runs.
        """
        # A login shell knows `module` and the like. A line that fails ends the job before the script starts.
        setup = ["set -e", *spec.setup] if spec.setup else []
        shell = "#!/bin/bash -l" if setup else "#!/bin/sh"
        lines = self.directives(spec, rooms)
        return "\n".join([shell, *lines, *about, *setup, f"exec {shlex.join(command)}", ""])

    def reachable(self) -> bool:
        """Returns whether the queue's programs are on this machine."""
        return shutil.which(self.asks) is not None

    def check_reachable(self, job: str) -> None:
        """Checks that the queue's programs are here.

        Raises:
            LaunchError: They aren't.
        """
        if not self.reachable():
            raise LaunchError(
                asked=f"{self.name} is to be asked about its job {job}",
                found=f"there is no {self.asks} on this machine",
                remedy=f"Run this on one of {self.name}'s login nodes",
            )


def names() -> tuple[str, ...]:
    """Returns the names of all queues, as `--on` takes them."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__)))


@functools.cache
def find(name: str) -> Queue:
    """Returns the queue of this name."""
    made: Queue = importlib.import_module(f"{__name__}.{name}").QUEUE
    return made


def every() -> list[Queue]:
    """Returns all queues."""
    return [find(name) for name in names()]
