"""Jobs from Python: functions in the place of scripts, and a job as an object.

    toolkit.launch.run(train, 0.1, workers=2)
    toolkit.launch.Launcher(workers=2, on="slurm").run(train, rate=0.1)
    job = toolkit.launch.submit(train, 0.1, workers=2)

cloudpickle takes functions along that no module holds, such as a notebook's.
"""

import itertools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import JobStopped, LaunchError, TaskFailed

__all__ = ["Job", "Launcher", "run", "submit"]

_LEAVING, _SECONDS = 5.0, 0.2  # That a launcher may take to leave, and between two looks at a job.
_RARELY, _HANGUP = 25, 129  # Looks for each in which Slurm's controller is asked; the code of a lost terminal.


def run(function: Callable[..., Any], *args: Any, **spec: Any) -> list[Any]:
    """Runs a function in the tasks of a job, and returns what each task returned: `Launcher(**spec).run(...)`.

    Args:
        function: Called in every task.
        args: Its arguments. Where it takes arguments by name, use a `Launcher`.
        spec: Attributes of a `JobSpec` but the command: workers=2, on="slurm", max_restarts=1 ...
    """
    return Launcher(**spec).run(function, *args)


def submit(what: Callable[..., Any] | str | os.PathLike, *args: Any, **spec: Any) -> "Job":
    """Starts a function or a script in the tasks of a job, and returns the job at once: `Launcher(**spec).submit(...)`.

    Args:
        what: A function, or the path of a script.
        args: Arguments for either.
        spec: As for `run`.
    """
    return Launcher(**spec).submit(what, *args)


class Launcher:
    """How jobs are to be launched: their options apart from the arguments of what runs in them.

    Args:
        spec: Attributes of a `JobSpec` but the command: workers=2, on="slurm", max_restarts=1 ...

    Raises:
        LaunchError: One of them can't be; it is named.
    """

    def __init__(self, **spec: Any) -> None:
        self._spec = spec
        self._make_spec(("-m", "toolkit.launch.task.called"))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a function in the tasks of a job, as `toolkit launch` runs a script, and returns each task's result.

        The function makes its strategy itself: `toolkit.strategies.create()`. It may be a notebook's; what it uses of
        other modules must be importable where the tasks run. Ctrl-C, or a notebook's stop button, ends the tasks.

        Args:
            function: Called in every task.
            args: Its arguments, for every task the same.
            kwargs: Those by name.

        Returns:
            A result for each task, in the order chief, workers, ps, evaluator; None for one that doesn't return, as a
            ps; at a rendezvous all of them where the chief is, and an empty list on the other hosts.

        Raises:
            LaunchError: What was asked can't be done, or the function or its arguments can't be sent.
            TaskFailed: The first task that failed, with its last lines; its cause is what the function raised.
            KeyboardInterrupt: Ctrl-C; the tasks have ended. Another signal to stop raises SystemExit.
        """
        from toolkit.launch import functions
        from toolkit.launch.here import run_here
        from toolkit.launch.records import jobs
        from toolkit.launch.records.record import Record

        spec = self._make_spec(("-m", "toolkit.launch.task.called"))
        work = functions.pickled(function, args, kwargs)
        record = Record.begin(spec, function=functions.name(function))
        record.keep_call(work)
        runs_on = False  # When this returns.
        try:
            if spec.place == "slurm":
                from toolkit.launch.backends import slurm

                slurm.submit(spec, follow=True, record=record)
            else:
                jobs.add(record, pid=os.getpid())
                run_here(spec, record)
            return functions.results(record)
        except TaskFailed as error:
            raise error from functions.cause(record)
        except JobStopped as error:
            runs_on = spec.place == "slurm" and error.exit_code == _HANGUP
            raise _stopped(error) from error
        finally:
            if not runs_on:  # Its tasks may still be about to read it.
                record.forget_call()

    def submit(self, what: Callable[..., Any] | str | os.PathLike, *args: Any, **kwargs: Any) -> "Job":
        """Starts a function or a script in the tasks of a job that goes on by itself, and returns the job.

        Args:
            what: As `run` takes it; or the path of a script, or "-m" and then the name of a module.
            args: Its arguments; a script's as texts.
            kwargs: A function's arguments by name.

        Raises:
            LaunchError: What was asked can't be done, or the function or its arguments can't be sent.
            TaskFailed: The job ended at once.
        """
        from toolkit.launch import detached, functions
        from toolkit.launch.records.record import Record

        work = None
        if callable(what):
            spec = self._make_spec(("-m", "toolkit.launch.task.called"))
            work = functions.pickled(what, args, kwargs)
        elif isinstance(what, (str, os.PathLike)) and not kwargs:
            spec = self._make_spec((os.fspath(what), *map(str, args)))
        else:
            raise LaunchError(
                asked=f"{what!r:.80} is to run in a job's tasks",
                found=f"that is {'a script, which takes no arguments by name' if kwargs else 'no function or script'}",
                remedy="Give a function, or the path of a script and its arguments as texts",
            )
        record = Record.begin(spec, function=functions.name(what) if callable(what) else "")
        if work is not None:
            record.keep_call(work)
        if spec.place == "slurm":
            from toolkit.launch.backends import slurm

            return Job(slurm.submit(spec, follow=False, record=record))
        try:
            return Job(detached.start(spec, record))
        except JobStopped as error:
            raise _stopped(error) from error

    def _make_spec(self, command: tuple[str, ...]) -> Any:
        from toolkit.launch.job.spec import JobSpec, options
        from toolkit.support import status

        if status.imports():
            raise LaunchError(
                asked="a job is to be launched",
                found="a task of another job is just importing its function, and that import launches it again",
                remedy='Put what launches under `if __name__ == "__main__":`',
            )
        unknown = set(self._spec) - {option.name for option in options()}
        if unknown:
            raise LaunchError(
                asked=f"{sorted(unknown)[0]}= is given to a launcher",
                found="it is none of its options",
                remedy="Give the function's own arguments to Launcher(...).run(function, name=value), or submit",
            )
        spec = JobSpec(command=command, **self._spec)
        if spec.place == "kubernetes":
            raise LaunchError(
                asked="a job is to be started on Kubernetes from Python",
                found="`toolkit launch --on=kubernetes` prints a manifest for a script, and starts nothing itself",
                remedy="Give its output to kubectl, or use ssh hosts or Slurm",
            )
        return spec


def _stopped(error: JobStopped) -> BaseException:
    """Returns what a loop over several jobs doesn't take for the failure of one."""
    return KeyboardInterrupt(str(error)) if error.exit_code == 130 else SystemExit(str(error))


class Job:
    """A job that goes on by itself, on this machine, by ssh or under Slurm.

    Args:
        found: Its id, the beginning of it, or the directory of its logs, as `toolkit attach` takes them.

    Attributes:
        id: Its id.

    Raises:
        LaunchError: No such job is known on this machine.
    """

    def __init__(self, found: Any) -> None:
        from toolkit.launch.records import jobs

        self._entry = found if isinstance(found, jobs.Entry) else jobs.find(str(found))
        self.id: str = self._entry.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.state}>"

    @property
    def state(self) -> str:
        """How it is: "running", "done", "exit code 1", "stopped", "dead"; under Slurm also "pending" and the like."""
        return self._entry.state()

    @property
    def directory(self) -> pathlib.Path:
        """The directory of its logs."""
        return self._entry.record.logs

    def done(self) -> bool:
        """Says whether it has ended, in whatever way; of one on another machine, whether its logs say so."""
        return self._entry.over or not (self._entry.alive or self._entry.elsewhere)

    def wait(self, timeout: float | None = None) -> str:
        """Waits for its end, and returns its state.

        Args:
            timeout: Seconds; None for as long as it takes.

        Raises:
            TimeoutError: It hasn't ended by then. It goes on.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        looks, every = itertools.count(), _RARELY if self._entry.slurm else 1
        while not (self._entry.over or (next(looks) % every == 0 and self.done())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Job {self.id} hasn't ended within {timeout:g} s; it goes on.")
            time.sleep(_SECONDS)
        ended = time.monotonic()  # Its launcher says so a moment before it has left.
        while self._entry.runs and self._entry.pid != os.getpid() and time.monotonic() - ended < _LEAVING:
            time.sleep(_SECONDS / 10)
        return self.state

    def results(self, timeout: float | None = None) -> list[Any]:
        """Waits for its end, and returns what the function has returned in each task; of a script, None for each.

        Args:
            timeout: As for `wait`.

        Raises:
            TaskFailed: It failed; the cause is what the function raised.
            JobStopped: It was stopped.
            TimeoutError: It hasn't ended by then.
        """
        from toolkit.launch import functions

        self.wait(timeout)
        record = self._entry.record
        end = next((event for event in record.new() if event["event"] == "end"), None)
        if end is None:
            last_lines = record.beginnings().splitlines()[-1:]
            words = "; its launcher wrote: " + last_lines[0] if last_lines else ""
            raise TaskFailed(f"Job {self.id} is {self.state}; its logs are in {record.logs}{words}", code=1)
        if end["stopped"]:
            raise JobStopped(end["code"] - 128)
        if end["code"]:
            raise TaskFailed(end["text"], code=end["code"]) from functions.cause(record)
        return functions.results(record)

    def logs(self, task: str = "", attempt: int | None = None) -> str:
        """Returns what a task has written.

        Args:
            task: Such as "worker:1"; "" for the first.
            attempt: Its number, from 1; None for the last.

        Raises:
            LaunchError: There is no such task or attempt.
        """
        from toolkit.launch.watch import log_of

        return log_of(self._entry, task, attempt).decode(errors="replace")

    def stacks(self) -> dict[str, str]:
        """Returns each task's Python stacks, as they are now.

        Raises:
            LaunchError: It doesn't run, or its launcher doesn't answer.
        """
        from toolkit.launch.watch import stacks

        return stacks(self._entry)[1]

    def stop(self) -> str:
        """Asks its tasks to end, waits for their end, and returns its state.

        Raises:
            LaunchError: It runs on another machine.
        """
        from toolkit.launch.watch import stop

        return stop(self._entry)
