"""A `train_step` or `test_step` on several replicas: it has its replica's share, and its logs are the whole batch's.

In a step each replica sees its own metrics and its own share of the batch only, and Keras takes the mean of what the
replicas return. Here, whatever of it is the result of a metric is computed again from the sums of all replicas, which
travel in one exchange. Any other scalar x_r counts by its replica's share: sum over r of w_r * x_r.
"""

import functools
import logging
import random
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from toolkit.strategies.context import here, known
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.collectives import joined
from toolkit.strategies.exchange.local_steps import count_rows
from toolkit.strategies.exchange.mesh import replica_count
from toolkit.strategies.input.batch_split import Part, row_count
from toolkit.strategies.options import options_of
from toolkit.strategies.step import xla
from toolkit.strategies.step.batch_share import Share, entered
from toolkit.strategies.step.exchange_schedule import local_function, put_before, trains_by_itself
from toolkit.strategies.step.inlining import inlining
from toolkit.strategies.step.moments import attach_to
from toolkit.strategies.step.no_examples import state_of_own
from toolkit.strategies.step.predict_step import of_one
from toolkit.strategies.step.results import Result, results_noted
from toolkit.strategies.step.shown import Tries
from toolkit.strategies.step.single_rows import rows_stay_together
from toolkit.strategies.step.view import View
from toolkit.strategies.step.whole_batch import is_whole, watch
from toolkit.strategies.variables.model_optimizers import optimizers_of
from toolkit.support.wrapping import wrap

__all__ = ["ReducesForKeras", "adapt_seeds", "make_function"]

_LOG = logging.getLogger(__name__)
_TEST_STEP = keras.Model.test_step  # Keras's own, which computes no means in a branch.
_SEEDS = "global_seed_generator"  # Keras's name for it.
_MOST_IN_FLOAT64 = 4096  # Elements of all metrics. With more, as in a confusion matrix, bytes count.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id, because tensors can't be hashed.


def adapt_seeds() -> None:
    """Makes steps draw random numbers by replica, also from a generator outside of the model.

    Later calls do nothing.
    """
    wrap(keras.random.SeedGenerator, "next", _next_seed)


def make_function(name: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes Keras create a step function that has its share.

    Keras reads the model's method when it creates the function.
    """
    if replica_count(model.distribute_strategy) == 1:
        return original(model, *args, **kwargs)
    step = getattr(model, name)
    before = model.__dict__.get(name)
    seeds = _global_seeds(model)

    @functools.wraps(step)
    def with_share(data: Any) -> Any:
        global_state.set_global_attribute(_SEEDS, seeds)
        if here.step.count == 1:
            return step(data)
        use = xla.use_of(model)
        attach_to(model, tf.distribute.get_replica_context())
        rows = row_count(data) if here.rows is None else here.rows
        has_own = None if here.rows is None else here.rows > 0
        if name == "train_step" and trains_by_itself(model):
            count_rows(model, rows)
            share = Share(rows, weight=tf.ones([], tf.float64), has_own=has_own)
            with collectives.by_itself(), entered(share), inlining(), state_of_own(model, share), known(xla=use):
                return _known_to_all(xla.in_pieces(model, name, step, share)(data))
        share = Share(rows, at_tape=name == "train_step" and uses_gradients(model, step), has_own=has_own)
        if name == "train_step" or getattr(step, "__func__", None) is not _TEST_STEP:
            share.weight  # noqa: B018 - Made here, outside of any branch of the step's, and while others compute.
        found = tries.of(step, data)
        if found.opened:
            if use is not None:
                use.say(f"{name} is computed without XLA, as it computes with the whole batch")
            view = View(share, found.trial, f"{type(model).__name__}.{name}")
            with results_noted(model) as noted:
                with view.entered(), inlining(), state_of_own(model, share), rows_stay_together():
                    logs = step(view.open(data))
                view.describe()
                return _of_all_replicas(logs, noted, view=view)
        share.sums = found.sums
        with entered(share), inlining(), results_noted(model) as noted:
            with state_of_own(model, share), known(xla=use):
                logs = xla.in_pieces(model, name, step, share)(data)
            return _of_all_replicas(logs, noted, weight=lambda: share.weight, sums=found.summed_logs)

    tries = Tries(model)

    def make() -> Any:
        watch(model)
        function = model.train_function
        model.__dict__[name] = with_share
        try:
            with xla.kept_out(model):
                result = original(model, *args, **kwargs)
        finally:
            del model.__dict__[name]
            if before is not None:
                model.__dict__[name] = before
        if name == "train_step" and model.train_function is not function:  # Keras keeps that of an earlier `fit`.
            model.train_function = xla.timed(model, model.train_function)
            if trains_by_itself(model):
                model.train_function = local_function(model)
        return result

    if name != "train_step" or (model.train_function is not None and not kwargs.get("force", bool(args and args[0]))):
        return make()
    return put_before(model, make)


def _global_seeds(model: keras.Model) -> Any:
    """Returns `keras.random`'s generator for calls without a seed: one for each thread, and replicas are threads.

    One that isn't there yet is made, as a step that is traced can't; Python's `random`, which seeds it, stays as it is.
    """
    state, strategy = random.getstate(), model.distribute_strategy
    try:
        with strategy.scope():
            found = seed_generator.global_seed_generator()
            held = found.state.value
            if getattr(held, "distribute_strategy", strategy) is not strategy:  # Of an earlier step.
                drawn = held.distribute_strategy.experimental_local_results(held)[0].numpy()
                global_state.set_global_attribute(_SEEDS, None)
                found = seed_generator.global_seed_generator()
                found.state.assign(drawn)
            return found
    finally:
        random.setstate(state)


def uses_gradients(model: keras.Model, step: Callable) -> bool:
    """Whether a script may use gradients before they are applied, so that they must be the batch's.

    Keras's own step hands them to Keras's optimizer as they are, which may need parts of them only, or adds them up.
    """
    if options_of(model.distribute_strategy).gradients.compression != "none":
        return False
    applies = [getattr(type(each), name) for each in optimizers_of(model) for name in ("apply", "apply_gradients")]
    own = any(not each.__module__.startswith("keras.") for each in applies)
    return own or getattr(step, "__func__", None) is not keras.Model.train_step


def _known_to_all(logs: Any) -> Any:
    """Marks logs as those of all replicas: what Keras shows of a step that each replica makes alone."""
    tensors = keras.tree.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, logs)
    _known.update({id(leaf): leaf for leaf in keras.tree.flatten(tensors) if tf.is_tensor(leaf)})
    return tensors


def _next_seed(original: Callable, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives each replica its own draws: copies of a generator's state are equal, and noise would be as well."""
    seed = original(generator, *args, **kwargs)
    replica = here.step.replica
    if not tf.is_tensor(seed) or here.view is not None:  # Between layers, replicas draw the same.
        return seed
    share = here.share
    if not replica:
        if share is not None:
            share.known.drawn.append(seed)
        return seed
    own = seed + tf.constant([0, replica * 0x9E37_79B1 % 2**31], seed.dtype)  # The first replica's are one device's.
    if share is not None:
        share.known.drawn.append(own)
    return own


def _of_all_replicas(
    logs: Any,
    noted: dict[int, Result],
    *,
    weight: Callable[[], tf.Tensor] = lambda: tf.ones([], tf.float64),
    sums: Collection[int] = (),
    view: View | None = None,
) -> Any:
    """Returns a step's logs as one device would have them.

    Args:
        logs: What a `train_step` or `test_step` has returned: any structure.
        noted: What `results_noted` has noted in it.
        weight: Returns this replica's part of all replicas' examples, a float64 scalar; a collective.
        sums: The numbers of the scalars that are sums over examples; others are means.
        view: The step's view of the whole batch, of which the scalars are then.
    """
    leaves = keras.tree.flatten(logs)
    metrics = {id(r.metric): r.metric for r in (noted.get(id(leaf)) for leaf in leaves) if r is not None}
    results = _results(list(metrics.values()))

    def of_all(number: int, leaf: Any) -> Any:
        result = noted.get(id(leaf))
        if result is not None and id(result.metric) in results:
            whole = results[id(result.metric)][result.place]
        elif (result is not None and is_whole(result.metric)) or (view is not None and tf.is_tensor(leaf)):
            whole = tf.identity(leaf)
        elif tf.is_tensor(leaf) and leaf.dtype.is_floating and leaf.shape.rank == 0:
            own = tf.cast(weight(), leaf.dtype)
            # A sum counts as it is, but of a replica without examples not at all.
            whole = collectives.all_reduce(tf.math.multiply_no_nan(leaf, tf.sign(own) if number in sums else own))
        else:
            return leaf
        _known[id(whole)] = whole
        return whole

    return keras.tree.pack_sequence_as(logs, [of_all(*pair) for pair in enumerate(leaves)])


def _results(metrics: list[keras.Metric]) -> dict[int, list]:
    """Returns the results of metrics over all replicas, flat, by the metrics' ids."""
    sums = {id(v): v for metric in metrics for v in metric.variables if v.aggregation == "sum"}
    if not sums:
        return {}
    tensors = [tf.convert_to_tensor(v) for v in sums.values()]
    exact = sum(each.shape.num_elements() for each in tensors) <= _MOST_IN_FLOAT64
    flat, split = joined([tf.cast(each, tf.float64 if exact else tf.float32) for each in tensors])
    parts = split(collectives.all_reduce(flat))
    totals = [(v, tf.cast(part, v.dtype)) for v, part in zip(sums.values(), parts, strict=True)]
    with keras.StatelessScope(state_mapping=totals):
        return {
            id(metric): [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(type(metric).result(metric))]
            for metric in metrics
            if any(id(v) in sums for v in metric.variables)
        }


class ReducesForKeras:
    """A mixin in front of TensorFlow's strategies."""

    made_by_toolkit = True
    experimental_local_results: Any

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; in a step of `fit` it is one, for one device's numbers."""
        return super().num_replicas_in_sync if here.share is None else 1  # type: ignore[misc]

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        """Runs a function on each replica, as TensorFlow does, with what Keras's loop has read for it."""
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._run_traced(fn)(args, kwargs or {}, options)
        divided = any(isinstance(leaf, (Part, tf.distribute.DistributedValues)) for leaf in _parts_and_leaves(args))

        def run_own(*args: Any, **kwargs: Any) -> Any:
            part = next((each for each in args if isinstance(each, Part)), Part(None, None, {}))
            with known(divided=divided, rows=part.rows, whole=frozenset(map(int, part.whole))):
                return fn(*(each.batch if isinstance(each, Part) else each for each in args), **kwargs)

        return of_one(super().run(run_own, args, kwargs, options), self)  # type: ignore[misc]

    def _run_traced(self, fn: Any) -> Callable:
        """Returns a traced function that runs a traced one's Python function: replicas meet in no inner function."""
        functions = vars(self).setdefault("_toolkit_traced", weakref.WeakKeyDictionary())
        if fn not in functions:
            python, itself = fn.python_function, weakref.proxy(self)

            @tf.function
            def run_all(args: tuple, kwargs: dict, options: Any) -> Any:
                return itself.run(python, args, kwargs, options)

            functions[fn] = run_all
        return functions[fn]

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces what TensorFlow reduces, and scalars along an axis.

        Of a step's logs Keras asks the mean along axis 0 of scalars (keras-team/keras#20585). Nothing else may be
        touched: metrics' variables are reduced through this method too.
        """
        if isinstance(value, (tuple, list, dict)):
            return tf.nest.map_structure(lambda leaf: self.reduce(reduce_op, leaf, axis), value)
        parts = self.experimental_local_results(value)
        if _are_of_all_replicas(parts):
            return parts[0]
        if axis is not None and all(part.shape.rank == 0 for part in parts):
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]


def _parts_and_leaves(args: tuple) -> Iterator[Any]:
    for each in args:
        yield from [each] if isinstance(each, Part) else tf.nest.flatten(each)


def _are_of_all_replicas(values: Any) -> bool:
    """Returns whether `_of_all_replicas` has returned these tensors: each replica has the same."""
    return all(_known.get(id(value)) is value for value in values)
