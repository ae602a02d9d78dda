"""A function in place of a script: sent to a job's tasks, called there, and its results collected.

    python -m toolkit.launch.functions

runs in each task. It calls the function from the file that TOOLKIT_CALL names, and leaves what the function returns or
raises beside that file.
"""

import inspect
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle

from toolkit.errors import LaunchError, RequestError
from toolkit.support import status

if TYPE_CHECKING:  # Tasks don't need it.
    from toolkit.launch.record import Record

_MOST = 64 << 20  # The most bytes of a function with its arguments.


def name(function: Any) -> str:
    """Returns a function's name for messages."""
    return str(getattr(function, "__qualname__", function))


def pickled(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Returns a function with its arguments, in the form that a task reads.

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


def _returned(record: "Record") -> dict[str, tuple[bool, Any]]:
    """Returns, for each task, whether the function returned, and its result or exception."""
    return {name: cloudpickle.loads(data) for name, data in record.results().items()}


def cause(record: "Record") -> BaseException | None:
    """Returns the exception of the first function that failed; None if it can't be sent."""
    return next((found for good, found in _returned(record).values() if not good), None)


def results(record: "Record") -> list[Any]:
    """Returns the function's result in each task of the last attempt, or None."""
    from toolkit.launch.record import Record

    events = Record(record.directory).new()
    tasks: list[str] = next((event["tasks"] for event in reversed(events) if event["event"] == "attempt"), [])
    found = _returned(record)
    return [found[name][1] if name in found else None for name in tasks]


def _main() -> None:
    path = os.environ[status.CALL]
    with open(path, "rb") as file:
        folders, files, work = pickle.load(file)
    sys.path += [folder for folder in folders if folder not in sys.path]
    with status.importing():  # A module that this imports and that launches a job would do so for ever.
        function, args, kwargs = cloudpickle.loads(work)
    _name_files(function, files)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            words = "".join(traceback.format_exception_only(error)).strip()
            _leave(path, (False, error)) or _leave(path, (False, RuntimeError(words)))
        raise
    if not _leave(path, (True, value)):
        raise RequestError(
            asked=f"the result of {getattr(function, '__qualname__', function)} is to be sent to the caller",
            found=f"a {type(value).__qualname__} can't be pickled",
            remedy="Return numbers, strings, NumPy arrays, or lists and dicts of them, such as model.get_weights()",
        )


def _name_files(function: Any, files: Mapping[str, str]) -> None:
    """Sets the file names of functions that were sent, because cloudpickle leaves them out."""
    every = [function, *getattr(function, "__globals__", {}).values()]
    for each in every:
        named = isinstance(each, types.FunctionType) and os.path.exists(each.__code__.co_filename)
        if isinstance(each, types.FunctionType) and not named and each.__qualname__ in files:
            each.__code__ = _named(each.__code__, files[each.__qualname__])


def _named(code: types.CodeType, file: str) -> types.CodeType:
    inner = tuple(_named(each, file) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)


def _leave(path: str, result: tuple[bool, Any]) -> bool:
    try:
        data = cloudpickle.dumps(result)
        cloudpickle.loads(data)  # Some objects can be pickled but not unpickled.
    except Exception:
        return False
    own = f"{path}.{status.task_name().replace(':', '-')}"
    with open(f"{own}.part", "wb") as file:
        file.write(data)
    os.replace(f"{own}.part", own)
    return True


if __name__ == "__main__":
    _main()
