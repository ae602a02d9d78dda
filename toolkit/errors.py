"""Every exception this toolkit raises on purpose.

ToolkitError
  RequestError               what was asked can't be done           exit code 2
    ClusterError             TF_CONFIG or the launcher's variables describe no usable cluster
    DeviceError              GPUs, memory, threads, or set-up came too late
    StrategyError            strategy unknown, or not possible here
    DataError                data directory, archive, batch size
    ModelError               model unknown, or not built
    LaunchError              what to launch is not clear, or not possible
    RunDirectoryError        run directory not usable, or another run's
      CheckpointError        nothing to resume, damaged, or another model's
  StoppedBySignal            SIGINT, SIGTERM or SIGHUP              exit code 128 + signal
  JobStopped                 the same, of a launched job
  TaskFailed                 a launched task failed                 its exit code
  TaskLost                   a task that can't be done without is gone  exit code 1
  CheckpointsFailing         checkpoints can no longer be written   exit code 1
  Diverged                   weights are no numbers any more        exit code 1
"""

import signal as _signal
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

__all__ = [
    "CheckpointError",
    "CheckpointsFailing",
    "ClusterError",
    "DataError",
    "DeviceError",
    "Diverged",
    "JobStopped",
    "LaunchError",
    "ModelError",
    "RequestError",
    "RunDirectoryError",
    "StoppedBySignal",
    "StrategyError",
    "TaskFailed",
    "TaskLost",
    "ToolkitError",
]


_FOLDER = __file__.removesuffix("errors.py")
_LONGEST = 1000  # Characters of a clause, which may hold what somebody else wrote.


def _end_in_a_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Takes the place of Python's last words, of an error that a script didn't catch."""
    if not isinstance(error, RequestError) or sys.flags.dev_mode:
        sys.__excepthook__(kind, error, trace)
        return
    libraries = (_FOLDER, sys.base_prefix, sys.prefix, "<")
    own = [each for each in traceback.extract_tb(trace) if not each.filename.startswith(libraries)]
    here = f" (in {own[-1].filename}, line {own[-1].lineno}; python -X dev shows all)" if own else ""
    sys.stderr.write(f"error: {error}{here}\n")
    sys.exit(error.exit_code)


class ToolkitError(Exception):
    """The root of the tree; `exit_code` is what a program that ends on it returns."""

    exit_code = 1
    # What is raised in a layer's call goes through Keras as it is: else it becomes a RuntimeError with the arguments.
    _keras_call_info_injected = True

    def __reduce__(self) -> tuple:
        """Has an error arrive in another process, as Ray's and multiprocessing's send them, as the same error."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[ToolkitError], args: tuple, attributes: dict) -> ToolkitError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class RequestError(ToolkitError):
    """What the user asked for can't be done.

    Args:
        asked: What was asked, as a clause: "gpus=4 asks for 4 GPUs".
        found: What was found, as a clause: "this machine has 2".
        remedy: What to do, as a sentence without its full stop: "Ask for at most gpus=2".
    """

    exit_code = 2

    def __init__(self, *, asked: str, found: str, remedy: str) -> None:
        asked, found = _short(asked), _short(found)
        super().__init__(f"{asked}, but {found}. {remedy}.")
        self.asked = asked
        self.found = found
        self.remedy = remedy
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _end_in_a_sentence

    @classmethod
    def check_choice(
        cls, value: object, choices: Sequence[str], *, asked: str, found: str = "there is no such choice"
    ) -> None:
        """Raises this error, which lists the choices, where a value is none of them."""
        if value not in choices:
            raise cls(asked=asked, found=found, remedy="Choose one of " + ", ".join(choices))


def _short(clause: str) -> str:
    return clause if len(clause) <= _LONGEST else f"{clause[: _LONGEST - 200]} ... {clause[-195:]}"


class ClusterError(RequestError):
    """What describes the cluster, or this process's task in it, can't be used."""


class DeviceError(RequestError):
    """The devices asked for are not there, or can't be set up that way (any more)."""


class StrategyError(RequestError):
    """The strategy asked for is unknown, or not possible in this process."""


class DataError(RequestError):
    """The data set can't be had, or has no such batches as were asked for."""


class ModelError(RequestError):
    """The model asked for is unknown, or its arguments don't fit."""


class LaunchError(RequestError):
    """What is to be launched is not clear, or can't be started on this machine."""


class RunDirectoryError(RequestError):
    """The run directory can't be used for this run."""


class CheckpointError(RunDirectoryError):
    """There is no checkpoint that this run can resume from."""


class StoppedBySignal(SystemExit):
    """The run received a signal to stop; `step` is that of the checkpoint it wrote then, None if it wrote none.

    It is a SystemExit, and no Exception: `except Exception` around a training doesn't catch it, and a script that it
    ends exits with 128 + the number, and without a traceback.
    """

    def __init__(self, number: int, *, step: int | None) -> None:
        name = _signal.Signals(number).name
        where = (
            "at once; checkpoints written so far are kept" if step is None else f"after step {step}; checkpoint written"
        )
        super().__init__(f"Stopped by {name} {where}.")
        self.number = number
        self.step = step
        self.exit_code = self.code = 128 + number


class JobStopped(ToolkitError):
    """The launcher received a signal to stop, and all its tasks have ended."""

    def __init__(self, number: int, *, then: str = "all tasks have ended") -> None:
        super().__init__(f"Stopped by {_signal.Signals(number).name}; {then}.")
        self.exit_code = 128 + number


class TaskFailed(ToolkitError):
    """A launched task failed, and the others were ended; `exit_code` is the task's.

    Attributes:
        words: What happened, without what to do about it.
    """

    def __init__(self, message: str, *, code: int, advice: str = "") -> None:
        super().__init__(message + advice)
        self.words = message
        self.exit_code = code


class TaskLost(ToolkitError):
    """A parameter server is gone, or every worker; the last checkpoint is there to resume from."""


class CheckpointsFailing(ToolkitError):
    """Several checkpoints in a row could not be written; the last good one is still there."""


class Diverged(ToolkitError):
    """Weights are NaN or infinite; checkpoints of before are still there."""
