"""A function on its way to a job's tasks, and what it has come to there; `task.called` is the other side."""

import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from toolkit.errors import LaunchError
from toolkit.launch.records.record import Record

__all__ = ["cause", "name", "pickled", "results"]

_MOST = 64 << 20  # Bytes of a function with its arguments.


def name(function: Any) -> str:
    """Returns what a function is called in messages."""
    return str(getattr(function, "__qualname__", function))


def pickled(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Returns a function with its arguments, as `task.called` reads them.

    Raises:
        LaunchError: It can't be called so, can't be pickled, or takes more than 64 MiB.
    """
    called = name(function)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        what = f"{function!r:.80}" if not callable(function) else called
        raise LaunchError(
            asked=f"{what} is to run in the job's tasks",
            found="it can't be called"
            if not callable(function)
            else f"it can't be called with these arguments ({error})",
            remedy="Give a function and all its arguments; for a script use toolkit.launch.submit",
        ) from None
    except ValueError:  # One of C's, which doesn't say what it takes.
        pass
    try:
        work = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # Whatever an object's own __reduce__ raises.
        raise LaunchError(
            asked=f"{called} is to run in the job's tasks",
            found=f"it or its arguments can't be pickled ({error})",
            remedy="Create such objects, for example models and data sets, inside the function",
        ) from error
    if len(work) > _MOST:
        raise LaunchError(
            asked=f"{called} is to run in the job's tasks",
            found=f"it and its arguments take {len(work) >> 20} MiB, and the limit is {_MOST >> 20} MiB",
            remedy="Read large data from files inside the function",
        )
    return pickle.dumps((sys.path, _files(function), work))


def _files(function: Any) -> dict[str, str]:
    """Returns the files of a function, and of those beside it that come along, by their names."""
    every = [function, *getattr(function, "__globals__", {}).values()]
    found = [each for each in every if isinstance(each, types.FunctionType)]
    return {each.__qualname__: each.__code__.co_filename for each in found}


def _returned(record: Record) -> dict[str, tuple[bool, Any]]:
    """Returns, by tasks, whether the function returned, and what it returned or raised."""
    return {name: cloudpickle.loads(data) for name, data in record.results().items()}


def cause(record: Record) -> BaseException | None:
    """Returns what the first function that failed has raised; None for what can't be sent."""
    return next((found for good, found in _returned(record).values() if not good), None)


def results(record: Record) -> list[Any]:
    """Returns what the function has returned in each task of the last attempt, None where it hasn't."""
    events = Record(record.directory).new()
    tasks: list[str] = next((event["tasks"] for event in reversed(events) if event["event"] == "attempt"), [])
    found = _returned(record)
    return [found[name][1] if name in found else None for name in tasks]
