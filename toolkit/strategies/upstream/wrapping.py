"""How a function of Keras's or TensorFlow's is replaced: for the process, for one object, or for the time of a call."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import table

_BEFORE = "_toolkit_before"  # What an object had of its own; None if its class's method.
_LIBRARIES = ("keras.", "tensorflow.")  # Whose classes stay as they are while objects of theirs live.


replaced_here: list[tuple[Any, str]] = []  # The owners and names of what is replaced for the process.
_originals: dict[
    tuple[int, str], tuple[Any, Any]
] = {}  # By the owner's id and the name: the owner, and what was there.
# The objects' classes, and the names of methods that objects have instead.
attached_here: set[tuple[type, str]] = set()
_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id: not all can be hashed.


class Replaced:
    """A function of Keras's or TensorFlow's that is replaced for the process, once, when somebody is to answer for it.

    A call goes to the first of those in `answers` who is there and whose turn it is, in the order in which they are
    written. It is given the next one of them in the place of the original function.

    Args:
        names: What it is called in the table, such as "Optimizer.apply"; several for methods of the same parameters.
        answers: By the name of who may answer, the attribute of `this_step` that is set when it is their turn; "" if it
            always is.
    """

    def __init__(self, *names: str, **answers: str) -> None:
        self.names = names
        self._turns = answers
        self._functions: dict[str, Callable] = {}
        self._chain: tuple[tuple[str, Callable], ...] = ()
        self._installed = False

    def answer(self, **functions: Callable) -> None:
        """Has these functions answer from now on; a second time changes nothing.

        Args:
            functions: By the names given above: takes the next one, or the original, then the call's arguments.

        Raises:
            RequestError: There is no such function in the Keras or TensorFlow that is installed.
        """
        self._functions.update(functions)
        self._chain = tuple((self._turns[who], self._functions[who]) for who in self._turns if who in self._functions)
        if not self._installed:
            for name in self.names:
                self._install(*table.owner_and_name(table.row(name)))
            self._installed = True

    def _install(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        replacement = self._replacement(original, is_method=isinstance(owner, type))
        vars(replacement)["_toolkit"] = self.names
        setattr(owner, name, replacement)
        if "toolkit" not in self._turns:  # That mends Keras, also where no strategy is.
            _originals[id(owner), name] = owner, original
        replaced_here.append((owner, name))

    def _replacement(self, original: Callable, *, is_method: bool) -> Any:
        first = functools.partial(self._call, original, 0)
        if list(self._turns.values()) == [""]:  # Nobody else will ever answer.
            first = functools.partial(self._chain[0][1], original)
        if not is_method:
            return functools.update_wrapper(first, original, updated=())

        def method(*args: Any, **kwargs: Any) -> Any:
            return first(*args, **kwargs)

        return functools.wraps(original)(method)

    def _call(self, original: Callable, place: int, /, *args: Any, **kwargs: Any) -> Any:
        for number, (turn, function) in enumerate(self._chain[place:], place + 1):
            if not turn or getattr(this_step, turn):
                left = number < len(self._chain)
                return function(functools.partial(self._call, original, number) if left else original, *args, **kwargs)
        return original(*args, **kwargs)


def add(owner: type, name: str, method: Callable) -> None:
    """Gives a class a method that it lacks, for the whole process; does nothing if it has one."""
    if not hasattr(owner, name):
        setattr(owner, name, method)
        replaced_here.append((owner, name))


@contextlib.contextmanager
def instead(owner: type, name: str, make: Callable) -> Iterator[None]:
    """A context in which `owner.name` is `make(original)`."""
    original, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
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
    vars(method)[_BEFORE] = getattr(before, _BEFORE, before)
    vars(instance)[name] = method
    attached_here.add((kind, name))
    _holders[id(instance)] = instance


@contextlib.contextmanager
def away() -> Iterator[None]:
    """A context in which steps are as without this library: functions are the originals, and nothing is attached.

    It holds for all threads.
    """
    taken = []
    for instance in list(_holders.values()):
        own = vars(instance)
        for name, method in [(name, each) for name, each in own.items() if hasattr(each, _BEFORE)]:
            taken.append((own, name, method))
            if (before := getattr(method, _BEFORE)) is None:
                del own[name]
            else:
                own[name] = before
    with contextlib.ExitStack() as stack:
        for (_, name), (owner, original) in list(_originals.items()):
            stack.enter_context(instead(owner, name, lambda _, original=original: original))
        try:
            yield
        finally:
            for own, name, method in taken:
                own[name] = method


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
