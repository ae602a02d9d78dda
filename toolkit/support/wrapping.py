"""Wraps functions of other libraries, each once."""

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toolkit.errors import RequestError

TRIED = "Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21"
_LIBRARIES = ("keras.", "tensorflow.")  # Whose classes stay as they are while objects of theirs live.


wrapped_here: list[tuple[Any, str]] = []  # The owners and names of wrapped functions.
# The objects' classes, and the names of methods that objects have instead.
attached_here: set[tuple[type, str]] = set()


def installed(module: str) -> str:
    """Returns a module's package with its installed version: "keras 3.15.1"."""
    package = re.split("[.:]", module, maxsplit=1)[0]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed here, by their names."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces `owner.name` by `around(original, ...)`, for the whole process; a second time changes nothing.

    Several may wrap the same one, each around the others.

    Args:
        owner: A class or a module.
        name: The name of its method or function.
        around: Takes the original function, then its arguments.

    Raises:
        RequestError: There is no such thing in the Keras or TensorFlow that is installed.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        package = getattr(owner, "__module__", None) or owner.__name__
        raise RequestError(
            asked=f"{getattr(owner, '__qualname__', owner.__name__)}.{name} of {installed(package)} is needed",
            found="that version has none",
            remedy=f"Install a version that this toolkit was tried with: {TRIED}",
        )
    key = _key(around)
    wrapped_by: tuple[str, ...] = getattr(original, "_toolkit", ())
    if key in wrapped_by:
        return

    if isinstance(owner, type):

        def method(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        wrapped: Any = functools.wraps(original)(method)
    else:
        wrapped = functools.update_wrapper(functools.partial(around, original), original, updated=())
    vars(wrapped)["_toolkit"] = (*wrapped_by, key)
    setattr(owner, name, wrapped)
    wrapped_here.append((owner, name))


def add(owner: type, name: str, method: Callable) -> None:
    """Gives a class a method that it lacks, for the whole process; does nothing if it has one."""
    if not hasattr(owner, name):
        setattr(owner, name, method)
        wrapped_here.append((owner, name))


@contextlib.contextmanager
def instead(owner: type, name: str, make: Callable) -> Iterator[None]:
    """A context in which `owner.name` is `make(original)`."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _key(around: Callable) -> str:
    function = getattr(around, "func", around)  # Of a functools.partial.
    return f"{function.__module__}.{function.__qualname__}"


def attach(instance: Any, **methods: Callable) -> None:
    """Gives one object its own methods; a second time changes nothing.

    It stands in the object's own attributes, past `__setattr__`: its class, its type and what is made of its
    configuration are as they were, and so is every other object. `original` is what the object had before.

    Args:
        instance: The object.
        **methods: By the name of a method, what takes the original, the object, and the arguments.
    """
    for name, around in methods.items():
        _attach(instance, name, around)


def _attach(instance: Any, name: str, around: Callable) -> None:
    before = vars(instance).get(name)
    key = _key(around)
    attached: tuple[str, ...] = getattr(before, "_toolkit", ())
    if key in attached:
        return
    kind = type(instance)
    if before is not None:
        original: Callable = _without_instance(before)
    elif kind.__module__.startswith(_LIBRARIES):
        # Partials of C, because such a method may be called for each variable, and must not be seen in a traceback.
        original = getattr(kind, name)
    else:
        original = functools.partial(_of_class, name)
    method = functools.update_wrapper(functools.partial(around, original, instance), getattr(kind, name), updated=())
    vars(method)["_toolkit"] = (*attached, key)
    vars(instance)[name] = method
    attached_here.add((kind, name))


def _of_class(name: str, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method as the user's class has it now: a notebook's next cell, or its autoreload, may replace it."""
    return getattr(type(instance), name)(instance, *args, **kwargs)


def _without_instance(method: Callable) -> Callable:
    """Returns an object's own method as one that is given the object."""
    if hasattr(method, "_toolkit"):
        return functools.partial(method.func, *method.args[:-1])  # type: ignore[attr-defined]
    return lambda _, *args, **kwargs: method(*args, **kwargs)


def extend(instance: Any, mixin: type) -> None:
    """Puts the methods of a mixin, which are documented ones, before those of one object's class; once."""
    if not isinstance(instance, mixin):
        kind: Any = type(instance)
        instance.__class__ = _extended(kind, mixin)


@functools.cache
def _extended(kind: Any, mixin: Any) -> type:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
