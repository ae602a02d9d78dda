"""All exceptions of this toolkit.

ToolkitError
  RequestError               the request itself is wrong            exit code 2
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
_LONGEST = 1000  # The most characters of a clause, which may contain other programs' text.


def _end_in_a_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replaces Python's traceback for an error that a script didn't catch."""
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
    # Keras passes such an exception on from a layer's call; it wraps others in a RuntimeError with the arguments.
    _keras_call_info_injected = True

    def __reduce__(self) -> tuple:
        """Makes an error pickle, for Ray and multiprocessing, which send it to another process."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[ToolkitError], args: tuple, attributes: dict) -> ToolkitError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class RequestError(ToolkitError):
    """What the user asked for isn't possible.

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
        """Raises this error, with a list of the choices, if a value isn't one of them."""
        if value not in choices:
            raise cls(asked=asked, found=found, remedy="Choose one of " + ", ".join(choices))


def _short(clause: str) -> str:
    return clause if len(clause) <= _LONGEST else f"{clause[: _LONGEST - 200]} ... {clause[-195:]}"


class ClusterError(RequestError):
    """The description of the cluster, or of this process's task in it, is wrong."""


class DeviceError(RequestError):
    """The requested devices don't exist, or can't be set up in this way or at this time."""


class StrategyError(RequestError):
    """The requested strategy is unknown, or isn't possible in this process."""


class DataError(RequestError):
    """The data set isn't available, or can't provide the requested batches."""


class ModelError(RequestError):
    """The requested model is unknown, or its arguments don't fit."""


class LaunchError(RequestError):
    """What to launch is unclear, or can't be started on this machine."""


class RunDirectoryError(RequestError):
    """The run directory can't be used for this run."""


class CheckpointError(RunDirectoryError):
    """There is no checkpoint from which this run can resume."""


class StoppedBySignal(SystemExit):
    """The run received a signal to stop. `step` is the step of the checkpoint that it wrote, None if it wrote none.

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
    """The launcher received a signal to stop, and all of its tasks have ended."""

    def __init__(self, number: int, *, then: str = "all tasks have ended") -> None:
        super().__init__(f"Stopped by {_signal.Signals(number).name}; {then}.")
        self.exit_code = 128 + number


class TaskFailed(ToolkitError):
    """A launched task failed, and the others were ended. `exit_code` is the task's.

    Attributes:
        words: What happened, without what to do about it.
    """

    def __init__(self, message: str, *, code: int, advice: str = "") -> None:
        super().__init__(message + advice)
        self.words = message
        self.exit_code = code


class TaskLost(ToolkitError):
    """A parameter server or every worker is lost; the run can resume from its last checkpoint."""


class CheckpointsFailing(ToolkitError):
    """Several checkpoints in a row could not be written; the last good one still exists."""


class Diverged(ToolkitError):
    """Weights are NaN or infinite; earlier checkpoints still exist."""
