"""A `train_step` or `test_step` on several replicas: it has its replica's share, and its logs are the whole batch's.

In a step each replica sees its own metrics and its own share of the batch only, and Keras takes the mean of what the
replicas return. Here, whatever of it is the result of a metric is computed again from the sums of all replicas, which
travel in one exchange. Any other scalar x_r counts by its replica's share: sum over r of w_r * x_r.

After that stand replicas without examples, `predict_step`, how steps are counted, and functions that a step calls.
"""

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.batches import row_count
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import processes
from toolkit.strategies.step import collectives, xla
from toolkit.strategies.step.collectives import joined
from toolkit.strategies.step.draws import Draws
from toolkit.strategies.step.exchange_schedule import is_local_step
from toolkit.strategies.step.local_steps import count_rows
from toolkit.strategies.step.moments import has_own, normalisations, normalises_batch, statistics_of, weigh_moments
from toolkit.strategies.step.replicas import alike
from toolkit.strategies.step.rows import ALIKE, Rows
from toolkit.strategies.step.share import Share, entered, keep_losses_apart
from toolkit.strategies.step.trial import Found, Result, Tries, batch_of_any_size, results_noted
from toolkit.strategies.step.view import View, rows_stay_together
from toolkit.strategies.step.whole_batch import is_whole
from toolkit.strategies.upstream import private, train_function
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.strategies.upstream.wrapping import attach
from toolkit.strategies.variables import optimizers_of

_LOG = logging.getLogger(__name__)
_TEST_STEP = keras.Model.test_step  # Keras's own, which computes no means in a branch.
_SEEDS = "global_seed_generator"  # Keras's name for it.
_MOST_IN_FLOAT64 = 4096  # Elements of all metrics. With more, as in a confusion matrix, bytes count.


class LoneStep:
    """A model's `train_step`, `test_step` or `predict_step`, as a strategy's only replica makes it.

    It makes none where data ends whose length nobody knew: there, TensorFlow would still count an update, and draw.

    Args:
        model: Of one of our strategies.
        name: The method's.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name, self._step = model, name, getattr(model, name)
        functools.update_wrapper(self, self._step, updated=())  # Without what TensorFlow knows a tf.function by.
        self._seeds = global_seeds(model)

    def __call__(self, data: Any) -> Any:
        """Makes the step with a batch."""
        use_seeds(self._seeds)
        tensors = [each for each in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(each)]
        with tf.control_dependencies(tensors):
            return self._step(data)

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """A context in which it is the model's method, which Keras reads when it makes a function of steps."""
        own, before = vars(self._model), vars(self._model).get(self._name)
        own[self._name] = self
        try:
            yield
        finally:
            del own[self._name]
            if before is not None:
                own[self._name] = before


class ReplicaStep(LoneStep):
    """A model's `train_step` or `test_step`, as each replica makes it: share, arithmetic, and logs.

    What replicas exchange and update is within the arithmetic: `optimizer.apply`.

    Args:
        model: Of a strategy of several replicas.
        name: The method's.
    """

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, name)
        self._step = _without_xla(self._step)
        self._trains = name == "train_step"
        self._tries = Tries(model)

    def __call__(self, data: Any) -> Any:
        """Makes the step of this replica with its part of a batch, and returns the whole batch's logs."""
        use_seeds(self._seeds)
        if this_step.count == 1:
            return self._step(data)
        is_local = self._trains and is_local_step(self._model)
        weigh_moments(self._model, tf.distribute.get_replica_context())
        keep_losses_apart(self._model)
        if is_local:
            return self._local_step(data)
        share = replica_share(data, at_tape=self._trains and uses_gradients(self._model, self._step))
        if self._trains or getattr(self._step, "__func__", None) is not _TEST_STEP:
            share.weight  # noqa: B018 - Made here, outside of any branch of the step's, and while others compute.
        with entered(share):
            found = self._tries.of(self._step, data)
            share.reads_gradients = found.reads_gradients or applies_own(self._model)
            return self._of_whole(data, share, found) if found.opened else self._of_rows(data, share, found)

    def _of_rows(self, data: Any, share: Share, found: Found) -> Any:
        """Makes a step that needs no more than this replica's rows."""
        share.sums = found.sums
        if not has_one_size(self._model):  # As a trial has seen it, and so that rows are told from other sizes.
            data = batch_of_any_size(data, this_step.tables)
        with results_noted(self._model) as noted, this_step.having(draws=Draws(share)):
            logs = self._computed(data, share)
            return _of_all_replicas(logs, noted, share=share, of=found.logs)

    def _of_whole(self, data: Any, share: Share, found: Found) -> Any:
        """Makes a step that sees the whole batch, and whose layers compute this replica's rows."""
        with results_noted(self._model) as noted:
            if (use := xla.use_of(self._model)) is not None:
                use.say(f"{self._name} is computed without XLA, as it computes with the whole batch")
            compiled = this_step.having(compiled_alone=xla.compiled_alone(self._model))
            view = View(share, found.trial, f"{type(self._model).__name__}.{self._name}")
            with view.entered(), compiled, inlining(), state_of_own(self._model, share), rows_stay_together():
                logs = self._step(view.open(data))
            view.describe()
            return _of_all_replicas(logs, noted, view=view)

    def _local_step(self, data: Any) -> Any:
        """Makes a step of a replica that exchanges nothing. Its logs are taken for those of all."""
        share = replica_share(data, weight=tf.ones([], tf.float64))
        count_rows(self._model, share.count)
        with collectives.local_step(), entered(share):
            logs = self._computed(data, share)
        return keras.tree.map_structure(lambda leaf: alike(tf.identity(leaf)) if tf.is_tensor(leaf) else leaf, logs)

    def _computed(self, data: Any, share: Share) -> Any:
        compiled = this_step.having(compiled_alone=xla.compiled_alone(self._model), xla=xla.use_of(self._model))
        with inlining(), state_of_own(self._model, share), compiled:
            return xla.in_pieces(self._model, self._name, self._step, share)(data)


def replica_share(data: Any, **given: Any) -> Share:
    """Returns this replica's share of a step's batch, of which it has some rows, or a copy of one in place of none.

    Args:
        data: Its part of the batch.
        **given: As of `Share`.
    """
    if this_step.rows is None:
        return Share(row_count(data), **given).of_batch(data)
    return Share(this_step.rows, has_own=this_step.rows > 0, **given).of_batch(data)


def uses_gradients(model: keras.Model, step: Callable) -> bool:
    """Whether a script may use gradients before they are applied, so that they must be the batch's.

    Keras's own step hands them to Keras's optimizer as they are, which may need parts of them only, or adds them up.
    """
    if options_of(model.distribute_strategy).gradients.compression != "none":
        return False
    return applies_own(model) or getattr(step, "__func__", None) is not keras.Model.train_step


def applies_own(model: keras.Model) -> bool:
    """Whether an optimizer of a model is given gradients by a script's own method."""
    applies = [getattr(type(each), name) for each in optimizers_of(model) for name in ("apply", "apply_gradients")]
    return any(not each.__module__.startswith("keras.") for each in applies)


def _of_all_replicas(
    logs: Any,
    noted: dict[int, Result],
    *,
    share: Share | None = None,
    of: Mapping[int, Rows] = MappingProxyType({}),
    view: View | None = None,
) -> Any:
    """Returns a step's logs as one device would have them.

    Args:
        logs: What a `train_step` or `test_step` has returned: any structure.
        noted: What `results_noted` has noted in it.
        share: This replica's.
        of: What the tensors are; scalars of which nothing is known are means.
        view: The step's view of the whole batch, of which the scalars are then.
    """
    leaves = keras.tree.flatten(logs)
    metrics = {id(r.metric): r.metric for r in (noted.get(id(leaf)) for leaf in leaves) if r is not None}
    results = _results(list(metrics.values()))

    def of_all(number: int, leaf: Any) -> Any:
        if isinstance(leaf, keras.Variable):  # Such as a learning rate.
            leaf = tf.convert_to_tensor(leaf)
        result = noted.get(id(leaf))
        if result is not None and id(result.metric) in results:
            whole = results[id(result.metric)][result.place]
        elif (result is not None and is_whole(result.metric)) or (view is not None and tf.is_tensor(leaf)):
            whole = tf.identity(leaf)
        elif share is not None and not (kind := of.get(number, ALIKE)).is_alike:
            whole = share.of_all(leaf, kind)
        else:
            return leaf
        return alike(whole)

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


# What a replica keeps of a step for which it has no examples: nothing.
#
# A batch may have fewer examples than there are replicas (`batches.py`). A replica without one computes with
# a copy of another's, so that no mean is 0 / 0, and its share is zero: gradients, losses, logs and exchanges leave it
# out. What is left is the state that belongs to a replica alone: metrics, and statistics of its own share. It is set
# back.


@contextlib.contextmanager
def state_of_own(model: Any, share: Share) -> Iterator[None]:
    """A context for a step, after which metrics and statistics are as before if the replica has no examples."""
    if share.has_own is None:
        yield
        return
    layers = normalisations(model)
    held = [*model.metrics_variables, *(variable for each in layers for variable in statistics_of(each))]
    before = [tf.convert_to_tensor(each) for each in held]
    yield
    shared = [each for each in layers if normalises_batch(each, this_step.options) and not has_own(each)]
    of_all = {id(variable) for each in shared if not this_step.is_local for variable in statistics_of(each)}
    for variable, value in zip(held, before, strict=True):
        if id(variable) not in of_all and variable.aggregation != "only_first_replica":  # Those are the batch's.
            variable.assign(tf.where(share.has_own, tf.convert_to_tensor(variable), value))


# A replica's `predict_step`: predictions of its own examples, and what isn't by example once.
#
# Keras joins replicas' outputs along axis 0. A copy that a replica was given in place of examples is left out here. Of
# an output whose first axis isn't the batch's, such as a table or a mean over the batch, the first replica's is taken.


def predict_own(original: Callable, model: Any, data: Any) -> Any:
    """Returns a replica's part of a batch's predictions."""
    if not this_step.divided or this_step.count == 1:
        return original(model, data)
    kept = None if this_step.rows is None else tf.where(this_step.rows > 0, tf.constant(tf.int32.max), 0)
    weigh_moments(model, tf.distribute.get_replica_context())  # Layers that normalise by the batch also here.
    with this_step.having(compiled_alone=xla.compiled_alone(model)):
        return _predict_own(original, model, data, kept)


def _predict_own(original: Callable, model: Any, data: Any, kept: tf.Tensor | None) -> Any:
    use = xla.use_of(model)
    predict = xla.predicted(original, use)
    if has_one_size(model):  # One replica has the whole batch.
        return keras.tree.map_structure(lambda leaf: leaf if kept is None else leaf[:kept], predict(model, data))
    step: Any = functools.partial(original, model)
    step.__func__ = type(model).predict_step  # As a bound method has it.
    found = vars(model).setdefault("_toolkit_predicts", Tries(model)).of(step, data, returns_rows=True)
    several = processes(model.distribute_strategy) > 1

    def part(number: int, leaf: Any, rows: Callable[[Any], Any]) -> Any:
        if found.by_example.get(number, True):
            leaf = rows(leaf)
            return leaf if kept is None else leaf[:kept]
        if leaf.shape.rank:
            return leaf if this_step.replica == 0 else leaf[:0]
        if several:
            raise StrategyError(
                asked="predict with a model some of whose outputs aren't by example",
                found="an output is a scalar, and workers' outputs are joined along axis 0",
                remedy="Return such an output once for each example, or predict on one device",
            )
        return alike(tf.identity(leaf))

    def parts(outputs: Any, rows: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        leaves = [part(number, leaf, rows) for number, leaf in enumerate(keras.tree.flatten(outputs))]
        return keras.tree.pack_sequence_as(outputs, leaves)

    if not found.opened:
        share = replica_share(data)
        with entered(share), this_step.having(draws=Draws(share)):  # As of dropout that stays on in predictions.
            return parts(predict(model, batch_of_any_size(data, this_step.tables)))
    if use is not None:
        use.say("predict_step is computed without XLA, as it computes with the whole batch")
    share = replica_share(data)
    view = View(share, found.trial, f"{type(model).__name__}.predict_step", sized=False)
    with view.entered(), inlining(), rows_stay_together():
        outputs = parts(original(model, view.open(data)), view.cut)
    view.describe()
    return outputs


def has_one_size(model: Any) -> bool:
    """Returns whether a model was made for batches of one size, as a stateful one is."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    sizes = any(each.shape and each.shape[0] is not None for each in inputs)
    return sizes or any(getattr(each, "stateful", False) for each in layers_within(model))


def global_seeds(model: keras.Model) -> Any:
    """Returns `keras.random`'s generator for calls without a seed: one for each thread, and replicas are threads.

    One that isn't there yet is made, as a step that is traced can't; Python's `random`, which seeds it, stays as it is.
    """
    state, strategy = random.getstate(), model.distribute_strategy
    try:
        with strategy.scope():
            found = private.global_state.get_global_attribute(_SEEDS)
            counted, held = seeds_drawn(), None if found is None else found.state.value
            # One variable for all replicas would count each of their draws.
            of = getattr(held, "distribute_strategy", strategy if replica_count(strategy) == 1 else None)
            if held is None or of is not strategy:
                found = keras.random.SeedGenerator()
                use_seeds(found)
                if counted is not None:
                    found.state.assign(counted)
            return found
    finally:
        random.setstate(state)


def seeds_drawn() -> list[int] | None:
    """Returns what the generator for calls without a seed counts; None if there is none, or none that can be read."""
    found = private.global_state.get_global_attribute(_SEEDS)
    held = None if found is None else found.state.value
    if held is None or tf.is_symbolic_tensor(held):
        return None
    strategy = getattr(held, "distribute_strategy", None)
    held = held if strategy is None else strategy.experimental_local_results(held)[0]
    return [int(each) for each in held.numpy()]


def use_seeds(generator: Any) -> None:
    """Has `keras.random` draw by a generator in this thread, in calls without a seed."""
    private.global_state.set_global_attribute(_SEEDS, generator)


# Counts the steps that a model makes.
#
# With `steps_per_execution` Keras makes several steps in one call, and tells callbacks the last one that the call may
# have made. Where its data ends, and where `steps_per_epoch` isn't a multiple, the call has made another number of
# steps.


_COUNT = "_toolkit_step_count"


class _Count:
    """Holds the variable, so that Keras and TensorFlow don't save it with the model."""

    def __init__(self) -> None:
        self.variable = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            name="step_count",
            # As of metrics, so that a replica adds without the others.
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def count_steps(model: Any) -> Callable[[], int]:
    """Makes a compiled model count its steps from now on, where a call makes more than one.

    Returns:
        A function that returns how many steps it has made so far.
    """
    strategy = model.distribute_strategy
    if hasattr(strategy, "replace_functions"):  # Workers make the steps, and `count_dispatched` counts them.
        return lambda: vars(model).get(_COUNT, 0)
    count = vars(model).get(_COUNT)
    if count is None:
        with strategy.scope():
            count = vars(model)[_COUNT] = _Count()
        of_keras = getattr(model.train_step, "__func__", None)
        attach(model, train_step=_counted)
        vars(model)["train_step"].__func__ = of_keras  # By which Keras's own step is told from the user's.
        train_function.replace(model, train=None)  # An earlier one doesn't count.
    return lambda: int(strategy.experimental_local_results(count.variable)[0])


def count_dispatched(model: Any, steps: int) -> None:
    """Adds steps that were sent to workers."""
    vars(model)[_COUNT] = vars(model).get(_COUNT, 0) + steps


def _counted(original: Callable, model: Any, data: Any) -> Any:
    vars(model)[_COUNT].variable.assign_add(1)
    return original(model, data)


# Inlines a `tf.function` that a step calls.
#
# TensorFlow traces it as a separate function, and calls that again in whatever is traced later. But TensorFlow lets
# replicas exchange nothing in a function within a step; and beside parameter servers variables are tensors of the step,
# which a function that was traced in another step would go on using. Here its Python is called where it stands,
# converted by AutoGraph as usual. A function that XLA is asked to compile stays a function.
#
# TensorFlow has no public hook for it; `tests/strategies/test_inlining.py` fails when it changes.


def _without_xla(step: Callable) -> Callable:
    """Returns a model's step, traced without XLA if it is a function that XLA is asked to compile as a whole.

    Replicas can't meet in such a one. What XLA may compile between their exchanges, `compile(jit_compile=True)` says.
    """
    if not getattr(step, "_jit_compile", False):
        return step
    function: Any = step
    _LOG.warning(
        "%s is a tf.function with jit_compile=True, in which replicas can't exchange anything: it is computed without "
        "XLA. Leave the decorator out, and compile the model with jit_compile=True",
        function.__name__,
    )
    return tf.function(function.python_function, autograph=function._autograph)


def inlining() -> contextlib.AbstractContextManager[None]:
    """A context in which a step is traced or run, with the functions that it calls inlined."""
    return this_step.having(inlines=True)


def call_function(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function's Python as a part of the step."""
    if function._jit_compile:
        return original(function, *args, **kwargs)
    python, status = function.python_function, private.ag_ctx.Status.DISABLED
    if function._autograph:
        python, status = private.py_func_from_autograph(python), private.ag_ctx.Status.ENABLED
    with private.ag_ctx.ControlStatusCtx(status):  # As TensorFlow does while it traces the function.
        return python(*args, **kwargs)
