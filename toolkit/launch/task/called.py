"""Runs in a task in place of a script: a function from the file that TOOLKIT_CALL names.

    python -m toolkit.launch.task.called

It leaves what the function returns or raises beside that file.
"""

import os
import pickle
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any

import cloudpickle

from toolkit.errors import RequestError
from toolkit.support import status

__all__: list[str] = []


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
