"""Finds a user's model: one of ours by name, a function of the user, or a saved file."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.models.networks import NAMES, build
from toolkit.support.words import did_you_mean, nearest
from toolkit.support.wrapping import instead

if TYPE_CHECKING:
    import keras

__all__ = ["open_model"]


def open_model(text: str, *, stop_at: Sequence[tuple[type, str]] = ()) -> "keras.Model":
    """Returns the model that a text names.

    Args:
        text: One of `NAMES`; "module:function" or "file.py:function", of a function that returns a model and needs no
            argument; or the path of a .keras file, which is opened in Keras's safe mode. A function that has a
            parameter `weights`, as those of keras.applications, is called with weights=None: else it downloads some.
        stop_at: Methods with which training begins, besides a model's own, as class and name: a script is run up to the
            first call of one.

    Raises:
        ModelError: There is none, or it can't be had without running code of the file.
    """
    if text in NAMES:
        return build(text)
    file, _, function = text.rpartition(":")
    if file.endswith(".py") and pathlib.Path(file).is_file():
        return _called(_imported(pathlib.Path(file)), function, stop_at=stop_at, asked=f"model {text}")
    try:
        if text.endswith((".keras", ".h5")) or os.path.sep in text or pathlib.Path(text).exists():
            return _loaded(pathlib.Path(text).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # A name of 300 letters, ~nobody, a NUL character.
        found = getattr(error, "strerror", None) or str(error)
        raise ModelError(asked=f"model {text!r}", found=found, remedy="Give the path of a .keras file") from None
    if ":" in text:
        return _called(*text.split(":", 1), stop_at=stop_at, asked=f"model {text}")
    raise ModelError(
        asked=f"model {text!r}",
        found="there is no model of that name, and it is neither module:function nor a file",
        remedy=f"Give {', '.join(NAMES)}, or such as net.py:build_model, or the path of a .keras file",
    )


def _loaded(path: pathlib.Path) -> Any:
    asked = f"the model in {path}"
    if not path.is_file():
        raise ModelError(asked=asked, found="there is no such file", remedy="Name one that model.save() has written")
    if not zipfile.is_zipfile(path):
        raise ModelError(
            asked=asked,
            found="it isn't a .keras file",
            remedy='Write one with model.save("model.keras")',
        )
    import keras

    try:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        text = " ".join(str(error).split())
        if "safe_mode" in text or "unsafe" in text:
            raise ModelError(
                asked=asked,
                found="opening it would run Python code in the file, such as a Lambda layer's",
                remedy="If you trust the model's code, give the module:function that builds it instead",
            ) from None
        raise ModelError(
            asked=asked,
            found=f"Keras can't open it: {text[:200].rstrip('.')}",
            remedy="Where it has your own classes, give module:function instead of the file",
        ) from None


def _imported(path: pathlib.Path) -> str:
    """Returns the module name of a file; its directory becomes the first in Python's search path."""
    sys.path.insert(0, str(path.resolve().parent))
    return path.stem


def _called(module: str, function: str, *, stop_at: Sequence[tuple[type, str]], asked: str) -> Any:
    if (here := str(pathlib.Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does.
    import keras

    try:
        _check_defined(module, function, asked)
        with _nothing_trained(stop_at):
            made = _module(module)
        found = getattr(made, function)
    except ImportError as error:
        raise ModelError(asked=asked, found=str(error), remedy="Start where the module can be imported") from None
    except AttributeError:
        raise ModelError(
            asked=asked, found=f"the module has no {function}", remedy="Name a function that returns a model"
        ) from None
    try:
        with _nothing_trained(stop_at):
            model = _call(found) if callable(found) and not isinstance(found, keras.Model) else found
    except _Trains:
        raise ModelError(
            asked=asked, found="it trains a model", remedy="Name a function that makes one and returns it untrained"
        ) from None
    except TypeError as error:
        raise ModelError(asked=asked, found=str(error), remedy="Name a function that takes no arguments") from None
    if not isinstance(model, keras.Model):
        raise ModelError(
            asked=asked, found=f"it gives a {type(model).__name__}", remedy="Name a function that returns a keras.Model"
        )
    return model


def _check_defined(module: str, function: str, asked: str) -> None:
    """Refuses a name that a module's source doesn't have, before the module, which may be a long script, runs."""
    spec = importlib.util.find_spec(module) if module not in sys.modules else None
    if spec is None or not (spec.origin or "").endswith(".py"):
        return
    try:
        tree = ast.parse(pathlib.Path(str(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Importing it says what is wrong.
    nodes = list(ast.walk(tree))
    made = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    made |= {node.id for node in nodes if isinstance(node, ast.Name)}
    aliases = [each for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for each in node.names]
    made |= {(each.asname or each.name).partition(".")[0] for each in aliases}
    if made & {function, "*", "__getattr__", "globals", "setattr", "exec"}:  # Each may make names that aren't written.
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    raise ModelError(
        asked=asked,
        found=f"{pathlib.Path(str(spec.origin)).name} has no {function}"
        + (f"; its functions are {', '.join(functions)}" if functions else " and no other function"),
        remedy=did_you_mean(nearest(function, functions)) + "Name a function that makes a model and returns it",
    )


class _Trains(BaseException):
    """Training is about to begin. A script's `except Exception` doesn't catch it."""


@contextlib.contextmanager
def _nothing_trained(stop_at: Sequence[tuple[type, str]] = ()) -> Iterator[None]:
    """A context in which starting to train raises `_Trains`, and a script sees no arguments of this program."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    def stop(_: Callable) -> Callable:
        def trains(*_args: Any, **_kwargs: Any) -> None:
            raise _Trains

        return trains

    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        with contextlib.ExitStack() as several:
            for kind, name in ((TensorFlowTrainer, "fit"), (TensorFlowTrainer, "train_on_batch"), *stop_at):
                several.enter_context(instead(kind, name, stop))
            yield
    finally:
        sys.argv = arguments


def _module(name: str) -> types.ModuleType:
    """Imports a module; of a script that trains at import, the part before that."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name!r}")
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except _Trains:
        del sys.modules[name]
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _call(function: Any) -> Any:
    try:
        weighted = "weights" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # A built-in function has no source file.
        weighted = False
    return function(weights=None) if weighted else function()
