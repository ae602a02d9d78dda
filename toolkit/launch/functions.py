"""Sends a function to a job's tasks and collects its results; `task.called` is the other side."""

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

_MOST = 64 << 20  # The most bytes of a function with its arguments.


def name(function: Any) -> str:
    """Returns a function's name for messages."""
    return str(getattr(function, "__qualname__", function))


def pickled(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Returns a function with its arguments, in the form that `task.called` reads.

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
    except ValueError:  # A function in C, which has no signature.
        pass
    try:
        work = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # An object's own __reduce__ may raise anything.
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
    """Returns the source files of a function and of the functions sent with it, by their names."""
    every = [function, *getattr(function, "__globals__", {}).values()]
    found = [each for each in every if isinstance(each, types.FunctionType)]
    return {each.__qualname__: each.__code__.co_filename for each in found}


def _returned(record: Record) -> dict[str, tuple[bool, Any]]:
    """Returns, for each task, whether the function returned, and its result or exception."""
    return {name: cloudpickle.loads(data) for name, data in record.results().items()}


def cause(record: Record) -> BaseException | None:
    """Returns the exception of the first function that failed; None if it can't be sent."""
    return next((found for good, found in _returned(record).values() if not good), None)


def results(record: Record) -> list[Any]:
    """Returns the function's result in each task of the last attempt, or None."""
    events = Record(record.directory).new()
    tasks: list[str] = next((event["tasks"] for event in reversed(events) if event["event"] == "attempt"), [])
    found = _returned(record)
    return [found[name][1] if name in found else None for name in tasks]
