"""Creates a model's variables before its first step, because replicas in a step can't create any.

On one device Keras lets the first step make what isn't there yet. Under a strategy it takes a batch from the data,
calls the model on tensors without values, and so fails where a model has no `call`, as GANs have none, and takes the
first shuffle from the data. Here the data's own description of its batches takes the place of a batch. The user's own
`train_step`, or `test_step` with data to evaluate, makes the variables as it does on one device: it is run once on
tensors without values, in which gradients are zeros, optimizers only say what they are given, and whatever is assigned
is forgotten.

Keras has no public hook for it: `Model._maybe_symbolic_build`, which models of our strategies have of their own, and
`Model._symbolic_build` are private; `tests/strategies/test_building.py` fails when they change.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.batches import Part
from toolkit.strategies.options import options_of
from toolkit.strategies.step import trial
from toolkit.strategies.step.moments import normalisations, normalises_batch
from toolkit.strategies.step.sharded_weights import note_shards
from toolkit.strategies.upstream.attributes import layers_below, layers_within
from toolkit.strategies.variables import optimizers_of

_LOG = logging.getLogger(__name__)
_NOTED = "_toolkit_noted_statistics"
_UNUSED = "_toolkit_unused"
_SIZED = (tf.TensorSpec, tf.SparseTensorSpec)
_ABSENT = ("OptionalSpec", "NoneTensorSpec")  # Keras's placeholders for missing labels or weights.


def check(model: Any, batch: int | None) -> None:
    """Says once which layers normalise the whole batch, and refuses what can't be divided.

    Args:
        model: A model of one of our strategies.
        batch: How many examples a batch of its data has; None where that isn't known.

    Raises:
        StrategyError: A stateful layer was built for the whole of a batch.
    """
    count = mesh.replica_count(model._distribute_strategy)
    if count == 1:
        return
    if not vars(model).get(_NOTED):
        _note_statistics(model)
    note_shards(model)
    if batch is not None:
        _check_states(model, batch, count)


def _note_statistics(model: Any) -> None:
    """Says once how many layers exchange sums, or whose numbers differ from one device's because they don't."""
    object.__setattr__(model, _NOTED, True)
    options = options_of(model.distribute_strategy)
    layers = [each for each in normalisations(model) if each.trainable]
    if options.local is not None:  # `exchange_schedule` says what that means.
        return
    count = sum(normalises_batch(each, options) for each in layers)
    if count:
        _LOG.info(
            "%d BatchNormalization layer%s the whole batch: in each step replicas exchange its sums, in one "
            'message forward and one backward. create(batch_statistics="replica") leaves each replica its own share',
            count,
            " normalises" if count == 1 else "s normalise",
        )
    names = [each.name for each in layers if not normalises_batch(each, options)]
    if names:
        _LOG.warning(
            '%s: each replica normalises its own share of a batch. create(batch_statistics="batch") has one device\'s '
            "numbers",
            f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0],
        )


def _check_states(model: Any, batch: int, count: int) -> None:
    """Refuses a stateful layer that was built for the whole batch, of which each replica has only a share."""
    for layer in layers_within(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            held = {state.shape[0] for state in keras.tree.flatten(layer.states or ())}
            if batch in held:
                raise StrategyError(
                    asked=f"{layer.name} is stateful, and was built for batches of {batch} examples",
                    found=f"each of {count} replicas has its share of a batch, and keeps the state of that",
                    remedy=f"Build the model for the share, with keras.Input(batch_shape=({batch // count}, ...)), and "
                    f"give fit batches of {batch}",
                )


def batch_spec(spec: Any, *, of_share: bool = False) -> Any:
    """Returns the spec of a batch from that of a distributed dataset's element.

    Args:
        spec: Of replicas' parts.
        of_share: Whether it is to be that of one replica's part.
    """

    def one(leaf: Any) -> Any:
        parts = getattr(leaf, "_value_specs", (leaf,))  # Of a PerReplica.
        if type(parts[0]).__name__ in _ABSENT:
            return None
        sizes = [each.shape[0] for each in parts if isinstance(each, _SIZED) and each.shape.rank]
        if of_share or isinstance(spec, Part) or len(sizes) < len(parts) or None in sizes:
            return parts[0]
        return type(parts[0])([sum(sizes), *parts[0].shape[1:]], parts[0].dtype)  # Which a script may have written out.

    return tf.nest.map_structure(one, spec.batch if isinstance(spec, Part) else spec)


def build(model: keras.Model, data: Any, *, trains: bool = True) -> None:
    """Builds what isn't built yet of a model, its metrics and, to train, its optimizers, in its strategy's scope.

    Args:
        model: A compiled model.
        data: (x,), (x, y) or (x, y, weights), or whatever else its step takes: whatever has shapes and dtypes.
        trains: Whether its `train_step` is to come, and not its `test_step`.

    Raises:
        Whatever the model's own step raises, where neither that nor calling the model can make the variables.
    """
    own = _is_own(model, "train_step") or (not trains and _is_own(model, "test_step"))
    # Keras builds by dense tensors alone.
    own = own or any(isinstance(leaf, tf.SparseTensorSpec) for leaf in tf.nest.flatten(data))
    with model.distribute_strategy.scope():
        try:
            if own and getattr(model, "compiled", False):
                _build_by_step(model, data, "train_step" if trains else "test_step")
            else:
                model._symbolic_build(data_batch=data)
        except Exception as error:
            if not model.run_eagerly:
                raise
            try:
                _build_by_values(model, data)
            except Exception as by_values:  # The user's own code may raise anything.
                _LOG.error(
                    "Replicas can't create variables. To have them created before, %s was run on tensors without "
                    "values, and then called on made-up ones: %r. Call the layers on a batch in strategy.scope()",
                    model.name,
                    by_values,
                )
                raise error from None
            model._symbolic_build(data_batch=data)


def _build_by_values(model: keras.Model, data: Any) -> None:
    """Calls a model that needs values, as one that is run eagerly may, on made-up ones; it changes no variable."""

    def made_up(leaf: Any) -> Any:
        if not isinstance(leaf, _SIZED) or isinstance(leaf, tf.SparseTensorSpec):
            return leaf
        fill = "" if leaf.dtype == tf.string else 1 if leaf.dtype.is_floating else 0
        return tf.constant(fill, leaf.dtype, [1 if size is None else size for size in leaf.shape])

    x, y, _ = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(made_up, data))
    with keras.StatelessScope():
        y_pred = model(x, training=False)
    for each in (model._compile_metrics, model._compile_loss):
        if each is not None and not each.built and y is not None:
            each.build(y, y_pred)


def _is_own(model: keras.Model, step: str) -> bool:
    return getattr(type(model), step) is not getattr(keras.Model, step)


def _build_by_step(model: keras.Model, data: Any, step: str) -> None:
    """Builds what a step needs. What it has left unbuilt before, such as an unused optimizer, it doesn't need."""
    unused = vars(model).setdefault(_UNUSED, {}).setdefault(step, weakref.WeakSet())
    if all(each in unused for each in _unbuilt(model, step)):  # Such as a model into which a checkpoint was restored.
        return
    try:
        _run_step(model, data, step)
    except Exception as by_step:  # The user's own code may raise anything.
        _LOG.debug("%s can't be run on tensors without values", step, exc_info=True)
        try:
            model._symbolic_build(data_batch=data)
        except Exception as by_call:
            if type(model).call is not keras.Model.call and not model.run_eagerly:
                _LOG.error("Calling the model fails, too: %r", by_call)
            raise by_step from None  # As one device shows it: with the line of the user's that raised it.
    unused.update(_unbuilt(model, step))


def _unbuilt(model: keras.Model, step: str) -> list[Any]:
    parts = [*layers_below(model), *model.metrics, getattr(model, "_compile_loss", None)]
    if step == "train_step":
        parts += optimizers_of(model)
    return [each for each in parts if not getattr(each, "built", True)]


def _run_step(model: keras.Model, data: Any, step: str) -> None:
    """Runs one of the model's own steps once without replicas and values, which creates all variables."""
    before = -1
    while before != len(model.variables):  # Again, because a step may ask for variables before it creates them.
        before = len(model.variables)
        done = _tried(getattr(model, step), data)
    for optimizer, variables in done.optimizers:
        if not optimizer.built:
            optimizer.build(variables)
    model._post_build()


def _tried(step: Callable, data: Any) -> Any:
    """Runs a step on batches of any size, or, where it asks for one, of the data's."""

    def of_any_size(leaf: Any) -> Any:
        sized = isinstance(leaf, (*_SIZED, tf.Tensor)) and leaf.shape.rank
        kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensorSpec) else tf.TensorSpec
        return kind([None, *leaf.shape[1:]], leaf.dtype) if sized else leaf

    try:
        return trial.run(step, tf.nest.map_structure(of_any_size, data))
    except Exception:  # The user's own code may raise anything.
        return trial.run(step, data)
