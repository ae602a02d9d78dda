"""Runs in each task before the user's script.

    python .../toolkit/launch/task/child.py STACKS AS_IS (SCRIPT | -m MODULE) [ARGUMENTS ...]

It is started by its path, and leaves the script what `python SCRIPT` would have given it: a `json.py` or a `toolkit/`
beside the script is the script's own.

STACKS is the file that the Python stacks go to when the launcher asks for them by SIGUSR1, even
while TensorFlow holds the interpreter lock. Unless AS_IS is 1, a script that makes TensorFlow's own
MultiWorkerMirroredStrategy or ParameterServerStrategy gets this toolkit's, under which Keras 3's `fit` works.
"""

import sys

_STARTED_WITH = frozenset(sys.modules)  # Modules that Python imports before any script.
if __name__ == "__main__":
    # Removes this file's own folder from the search path. Without an installation, adds the package's folder.
    sys.path[0] = sys.path[0] if getattr(sys.flags, "safe_path", False) else __file__.rpartition("/toolkit/")[0]

# ruff: noqa: E402
import atexit
import builtins
import faulthandler
import importlib.machinery
import importlib.util
import os
import pathlib
import pkgutil
import re
import runpy
import signal
import threading
import time
import types
from typing import Any

from toolkit.errors import RequestError
from toolkit.support import signals, status


def _main() -> None:
    stacks, as_is, *command = sys.argv[1:]
    file = open(stacks, "a")  # noqa: SIM115 - faulthandler needs it open as long as the process lives.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable()  # If native code crashes, its place is written to the log.
    signals.end_with_parent()
    folder = _folder(command)
    own = _shadows(folder)
    if as_is != "1" and "toolkit" not in own:
        _patch_when_imported()
    status.report(state="running")
    try:
        _run(command, folder, own)
    except SystemExit as end:
        if end.code not in (None, 0):
            _ends("failed", end.code if isinstance(end.code, int) else 1)
            raise
    except BaseException as error:
        _ends("failed", _code(error))
        if isinstance(error, KeyboardInterrupt):
            sys.exit(_code(error))
        if "toolkit" in own and _meant_for_ours(error):
            error = _shadowed(command, folder)
        if isinstance(error, RequestError):  # The error itself says what is wrong.
            sys.stderr.write(f"error: {error}\n")
        else:
            error = error.with_traceback(_users_own(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_code(error))
    _ends("ending", 0)


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, RequestError) else 1


def _ends(state: str, code: int) -> None:
    """Reports how the script has ended, and the threads that Python still waits for."""
    waited_for = {each for each in threading.enumerate() if not each.daemon} - {threading.main_thread()}
    names = sorted(each.name[:60] for each in waited_for)[:4]
    status.report(state=state, at=time.monotonic(), exit_code=code, threads=names)
    if names:
        atexit.register(status.report, threads=[])  # Python has joined them by then.


def _folder(command: list[str]) -> str:
    """Where `python SCRIPT` or `python -m MODULE` looks for modules first."""
    copy = os.path.join(status.logs() or "", "snapshot")
    if command[0] == "-m":
        return copy if status.logs() and os.path.isdir(copy) else os.getcwd()
    return str(pathlib.Path(command[0]).resolve().parent)


def _shadows(folder: str) -> set[str]:
    """Names of imported modules that Python would have found in this folder first."""
    found = set()
    for name in {name.partition(".")[0] for name in set(sys.modules) - _STARTED_WITH}:
        spec = importlib.machinery.PathFinder.find_spec(name, [folder])
        # A folder without __init__.py has no origin, and a module of the same name elsewhere comes first.
        if spec and spec.origin and spec.origin != getattr(sys.modules.get(name), "__file__", None):
            found.add(name)
    return found - {"__main__"}


def _meant_for_ours(error: BaseException) -> bool:
    """Whether the script imports its own `toolkit` and asks it for names of the installed one."""
    said = str(error) if isinstance(error, AttributeError | ImportError) else ""
    ours = pathlib.Path(__file__).parents[2]
    names = {match[1] for match in re.finditer(r"'(?:toolkit\.)?(\w+)'", said)} - {"toolkit"}
    return "toolkit" in said and any(name == "__version__" or (ours / name).is_dir() for name in names)


def _shadowed(command: list[str], folder: str) -> RequestError:
    spec = importlib.machinery.PathFinder.find_spec("toolkit", [folder])
    theirs = str(spec.origin if spec else folder).removesuffix("/__init__.py")
    return RequestError(
        asked=f"`import toolkit` in {command[-1] if command[0] == '-m' else command[0]}",
        found=f"{theirs} beside it is imported instead of the installed toolkit",
        remedy="Rename it",
    )


def _run(command: list[str], folder: str, own: set[str]) -> None:
    """Runs the script as `python SCRIPT` or `python -m MODULE` would."""
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    # Never undone: code that runs at exit or in a thread still pickles the script's classes.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if command[0] == "-m":
        if importlib.util.find_spec(command[1]) is None:
            raise RequestError(
                asked=f"launch starts the module {command[1]}",
                found="there is no such module",
                remedy="Check its name, and that it can be imported from this directory",
            )
        sys.argv = command[1:]
        # Private, and what `python -m` itself calls; run_module puts __main__ back at the end.
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    sys.argv = command
    path = os.path.abspath(command[0])
    if pkgutil.get_importer(path) is not None:  # A zipped program.
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    compiled = path.endswith(".pyc")
    made = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    loader = made("__main__", path)
    code = loader.get_code("__main__") if compiled else loader.source_to_code(loader.get_data(path), path)
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    assert code is not None
    exec(code, main.__dict__)


def _users_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Removes the frames of this file and of runpy from a traceback."""
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name and not name.endswith("/toolkit/launch/functions.py"):
            break
        trace = trace.tb_next
    return trace


def _patch_when_imported() -> None:
    import wrapt

    for module in ("tensorflow", "keras"):
        wrapt.register_post_import_hook(_patch, module)


def _patch(module: Any) -> None:
    from toolkit.launch.task import patches

    if module.__name__ == "keras":
        patches.report_progress(module)
        patches.guard_fit(module)
    else:
        patches.patch_strategies(module)
        patches.note_converted_lines(module)


if __name__ == "__main__":
    _main()
