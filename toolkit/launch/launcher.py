"""Launches jobs from Python: functions in place of scripts, and a job as an object.

    toolkit.launch.run(train, 0.1, workers=2)
    toolkit.launch.Launcher(workers=2, on="slurm").run(train, rate=0.1)
    job = toolkit.launch.submit(train, 0.1, workers=2)

cloudpickle takes functions along that no module holds, such as a notebook's.
"""

import os
from collections.abc import Callable
from typing import Any

from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import functions, jobs, site, starting
from toolkit.launch.job import Job
from toolkit.launch.record import Record
from toolkit.launch.spec import JobSpec, options
from toolkit.support import status
from toolkit.support.words import did_you_mean, nearest

_COMMAND = ("-m", "toolkit.launch.functions")  # What calls a function in each task.
_HANGUP = 129  # The exit code after the terminal was closed.


def run(function: Callable[..., Any], *args: Any, **spec: Any) -> list[Any]:
    """Runs a function in the tasks of a job, and returns what each task returned: `Launcher(**spec).run(...)`.

    Args:
        function: Called in every task.
        args: Its arguments. Where it takes arguments by name, use a `Launcher`.
        spec: Attributes of a `JobSpec` but the command: workers=2, on="slurm", max_restarts=1 ...
    """
    return Launcher(**spec).run(function, *args)


def submit(what: Callable[..., Any] | str | os.PathLike, *args: Any, **spec: Any) -> Job:
    """Starts a function or a script in the tasks of a job, and returns the job at once: `Launcher(**spec).submit(...)`.

    Args:
        what: A function, or the path of a script.
        args: Arguments for either.
        spec: As for `run`.
    """
    return Launcher(**spec).submit(what, *args)


class Launcher:
    """How to launch jobs: all options except the arguments of what runs in them.

    Args:
        spec: Attributes of a `JobSpec` but the command: workers=2, on="slurm", max_restarts=1 ...

    Raises:
        LaunchError: One of them can't be; it is named.
    """

    def __init__(self, **spec: Any) -> None:
        self._spec = site.with_defaults(spec, options(), str(spec.get("on", "local")).partition(":")[0])
        self._make_spec(_COMMAND)

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
        spec = self._make_spec(_COMMAND)
        work = functions.pickled(function, args, kwargs)
        record = Record.begin(spec, function=functions.name(function))
        record.keep_call(work)
        runs_on = False  # Set when this returns.
        try:
            if not spec.queued:
                jobs.add(record, pid=os.getpid())
            starting.run_to_end(spec, record)
            return functions.results(record)
        except TaskFailed as error:
            raise error from functions.cause(record)
        except JobStopped as error:
            runs_on = spec.queued and error.exit_code == _HANGUP
            raise _stopped(error) from error
        finally:
            if not runs_on:  # Its tasks may still be about to read it.
                record.forget_call()

    def submit(self, what: Callable[..., Any] | str | os.PathLike, *args: Any, **kwargs: Any) -> Job:
        """Starts a function or a script in the tasks of a detached job, and returns the job.

        Args:
            what: As `run` takes it; or the path of a script, or "-m" and then the name of a module.
            args: Its arguments; a script's as texts.
            kwargs: A function's arguments by name.

        Raises:
            LaunchError: What was asked can't be done, or the function or its arguments can't be sent.
            TaskFailed: The job ended at once.
        """
        work = None
        if callable(what):
            spec = self._make_spec(_COMMAND)
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
        try:
            return Job(starting.start_detached(spec, record))
        except JobStopped as error:
            raise _stopped(error) from error

    def _make_spec(self, command: tuple[str, ...]) -> JobSpec:
        if status.imports():
            raise LaunchError(
                asked="a job is to be launched",
                found="a task of another job is importing its function, and that import launches it again",
                remedy='Put what launches under `if __name__ == "__main__":`',
            )
        unknown = set(self._spec) - {option.name for option in options()}
        if unknown:
            name = sorted(unknown)[0]
            meant = did_you_mean(nearest(name, (option.name for option in options())))
            raise LaunchError(
                asked=f"{name}= is given to a launcher",
                found="a launcher has no such option",
                remedy=f"{meant}A function's own arguments go to Launcher(...).run(function, name=value), or submit",
            )
        spec = JobSpec(command=command, **self._spec)
        if spec.place == "kubernetes":
            raise LaunchError(
                asked="a job is to be started on Kubernetes from Python",
                found="`toolkit launch --on=kubernetes` prints a manifest for a script, and starts nothing itself",
                remedy="Give its output to kubectl, or use ssh hosts or a queue",
            )
        return spec


def _stopped(error: JobStopped) -> BaseException:
    """Returns the exception types that a loop over several jobs must not take for the failure of one."""
    return KeyboardInterrupt(str(error)) if error.exit_code == 130 else SystemExit(str(error))
