"""The first step of a script's own loop around `strategy.run`, compared with one device's.

A script calls a `tf.function` that runs a step on each replica. The first call of each such function is made twice, or
the second one, where the first makes variables: by the script, and on one device, where `strategy.run` calls the step,
and `strategy.reduce` returns what it is given. What the function uses of Keras's is found in what it and the functions
that it calls refer to.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.check import watching
from toolkit.strategies.check.both_ways import BothWays, compared
from toolkit.strategies.check.fewer_rows import Rows, by_example, counted, dealt_to_loop, first_rows
from toolkit.strategies.check.first_step import are_numbers, conclude
from toolkit.strategies.check.plain import PlainStep, Settings
from toolkit.strategies.check.state import Objects
from toolkit.strategies.check.watching import Step
from toolkit.strategies.check.whole_batches import whole_batch
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.upstream import replaced
from toolkit.support.frames import line_of, users_frame

_called: weakref.WeakSet = weakref.WeakSet()  # Functions that have made the variables that they need.
_seen: weakref.WeakSet = weakref.WeakSet()  # Functions that were compared, or needn't be.
# What the compared call of a function has returned, in a script that is only compared; None if it can't stand for the
# next ones.
_stand: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_CALL = "the loop"
_LIBRARIES = ("keras.", "tensorflow.", "toolkit.")
_KINDS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.Metric, keras.Variable)
_DEEPEST = 6  # How far a reference is followed.


def watch_loops() -> None:
    """Has the functions that this thread calls from now on compared, where they run steps on replicas."""
    replaced.FUNCTION.answer(check=_call)
    this_step.loops = True


def _call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and compares its first call if it runs a step on replicas."""
    python = function.python_function
    session = watching.session()
    if session is not None and function in _stand and tf.executing_eagerly():
        stands = _stand[function]
        session.again(_CALL, line_of(users_frame(sys._getframe(1))), made=stands is None)
        return original(function, *args, **kwargs) if stands is None else stands[0]
    known = (
        not tf.executing_eagerly() or function in _seen or str(getattr(python, "__module__", "")).startswith(_LIBRARIES)
    )
    if known:
        return original(function, *args, **kwargs)
    if function not in _called and not _are_built(found_in(python)):  # The first call makes variables: the next one.
        _called.add(function)
        return original(function, *args, **kwargs)
    _seen.add(function)
    strategy = _runs(function.get_concrete_function(*args, **kwargs).graph)
    if strategy is None or replica_count(strategy) == 1:
        return original(function, *args, **kwargs)
    found = _compared(strategy, functools.partial(original, function), function, args, kwargs)
    if session is not None:
        _stand[function] = (found,) if are_numbers(found) else None
    return found


def _are_built(objects: Objects) -> bool:
    return all(getattr(each, "built", True) for each in (*objects.layers, *objects.optimizers))


def _runs(graph: Any) -> Any:
    """Returns the strategy on whose replicas a function runs a step; None if it runs none."""
    return getattr(graph, "_toolkit_strategy", None)


def _compared(strategy: Any, call: Callable, function: Any, args: tuple, kwargs: dict) -> Any:
    step = Step(_CALL, str(getattr(function.python_function, "__name__", "")), line_of(users_frame(sys._getframe(1))))
    readers = (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)
    if any(isinstance(each, readers) for each in tf.nest.flatten((args, kwargs))):
        step.skipped = "the function reads its batches itself. Give it one batch for each call"
        _keep(step)
        return call(*args, **kwargs)
    given = [list(args), dict(kwargs)]
    whole = whole_batch(strategy, given)
    own = [isinstance(each, tf.distribute.DistributedValues) for each in tf.nest.flatten(given)]
    divided = [each and has_rows for each, has_rows in zip(own, by_example(whole, given), strict=True)]
    objects = found_in(function.python_function)

    def make() -> Callable:
        once = tf.function(function.python_function, autograph=function._autograph)
        return lambda batches: once(*batches[0][0], **batches[0][1])

    def both(given: list, whole: Any) -> BothWays:
        return BothWays(
            PlainStep(objects, make, [whole], Settings(strategy=strategy)), lambda: call(*given[0], **given[1])
        )

    def fewer(rows: int) -> BothWays:
        cut = first_rows(whole, divided, rows)
        return both(dealt_to_loop(strategy, cut, divided), cut)

    found = compared(
        strategy,
        step,
        both(given, whole),
        known=lambda plain: _known(plain, objects),
        logs=lambda found: _logs(strategy, found),
        # A loop may take a mean of an empty share.
        rows=Rows(counted(strategy, [whole], divided), replica_count(strategy), fewer),
    )
    _keep(step)
    return found


def _keep(step: Step) -> None:
    session = watching.session()
    if session is not None:
        session.steps.append(step)
    else:
        conclude(step)


def _known(plain: PlainStep, objects: Objects) -> str:
    """Returns why a loop's step differs from one device's, where the reason is a known one; "" otherwise."""
    kind = keras.layers.BatchNormalization
    if any(isinstance(each, kind) and each.trainable and not each.synchronized for each in objects.layers):
        return "each replica normalises its own share of a batch in your own loop, unless a layer has synchronized=True"
    if plain.draws or plain.draws_by_seed:
        return "in your own loop each replica draws by its own seed: nothing says which rows it has"
    return ""


def _logs(strategy: Any, found: Any) -> Any:
    """Returns what a function has returned; of what each replica has its own, None: one device has no parts."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.distribute.DistributedValues):
            rows = whole_batch(strategy, leaf)
            return rows if rows.shape.rank else None
        return leaf

    return tf.nest.map_structure(one, found)


def found_in(function: Any) -> Objects:
    """Returns the objects of Keras's to which a function refers, also by what it calls and by objects of a script's."""
    every = list(_reached(function, set(), 0))
    kinds = [[each for each in every if isinstance(each, kind)] for kind in _KINDS]
    return Objects(*kinds)


def _reached(thing: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if id(thing) in seen or depth > _DEEPEST:
        return
    seen.add(id(thing))
    if isinstance(thing, _KINDS):
        yield thing
        return
    for each in _references(thing):
        yield from _reached(each, seen, depth + 1)


def _references(thing: Any) -> Iterator[Any]:
    """Yields what a function, a container, or an object of a script's refers to."""
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, weakref.ReferenceType):  # As a method's tf.function has its object.
        yield thing()
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # It is empty: the name isn't bound yet.
                continue
        yield from (thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__)
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    elif isinstance(thing, tf.types.experimental.PolymorphicFunction):
        yield thing.python_function
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set)):
        yield from thing
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, types.ModuleType)):
        known = type(thing).__module__.partition(".")[0] in ("keras", "tensorflow", "numpy", "toolkit", "builtins")
        yield from () if known else vars(thing).values()


def _names(code: Any) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
