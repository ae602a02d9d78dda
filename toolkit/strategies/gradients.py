"""The exchange of gradients between replicas, and what an optimizer does with them after it.

Keras's optimizers sum every gradient over all replicas. Here gradients of shards stay where they are, the others may be
sent in 16 bits and in packs, the last layers' first; and what Keras does before that sum is done after it: the norm by
which gradients are clipped is that of the sum, as on one device. Keras clips each replica's own gradient before the
sum, and its gradient accumulation under MirroredStrategy ends in an error.

Keras has no public hook for this. The methods of `keras.optimizers.Optimizer` wrapped here are the one place;
`tests/strategies/test_gradients.py` fails when they change.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies import collectives
from toolkit.strategies.exchange import exchange_of
from toolkit.strategies.replica_shards import ReplicaShardedVariable
from toolkit.support.wrapping import wrap

__all__ = ["adapt_optimizers", "reduced"]

# They look at a layer's variable as a whole: it is gathered for them, and each replica has all of its slots.
_WHOLE = ("Adafactor", "Lamb", "Muon")
_here = threading.local()


def adapt_optimizers() -> None:
    """Makes Keras's optimizers exchange gradients in this way on several replicas; called again, it does nothing."""
    optimizer = keras.optimizers.Optimizer
    wrap(optimizer, "_backend_apply_gradients", _apply)
    wrap(optimizer, "_clip_gradients", lambda original, self, grads: grads if _reduced() else original(self, grads))
    wrap(
        optimizer,
        "_all_reduce_sum_gradients",
        lambda original, self, pairs: pairs if _reduced() else original(self, pairs),
    )
    wrap(optimizer, "add_variable_from_reference", _slot)


def _reduced() -> bool:
    return getattr(_here, "reduced", False)


def _apply(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Sequence) -> None:
    if collectives.replica_id_and_count()[1] == 1:
        original(optimizer, grads, trainable_variables)
        return
    variables = list(trainable_variables)
    grads = reduced(grads, variables)
    if type(optimizer).__name__ in _WHOLE and any(isinstance(v, ReplicaShardedVariable) for v in variables):
        wholes = [
            v.gather(gradient) if isinstance(v, ReplicaShardedVariable) and gradient is not None else gradient
            for gradient, v in zip(grads, variables, strict=True)
        ]
        _accumulated(optimizer, wholes, variables, wholes=True)
        return
    overwriting = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if not optimizer.gradient_accumulation_steps and not overwriting:
        clipped = _clipped(optimizer, grads, variables)  # By Keras's own method, which does nothing from here on.
        _here.reduced = True
        try:
            original(optimizer, clipped, variables)
        finally:
            _here.reduced = False
        return
    # Keras puts these into a branch, from which tf.distribute can't call all replicas together. Each replica can
    # update its own copies by itself, once gradients are summed.
    _accumulated(optimizer, grads, variables)


def reduced(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients summed over all replicas; those of shards are left as they are.

    Args:
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
    """
    exchange = exchange_of(tf.distribute.get_strategy())
    out = list(grads)
    summed = [n for n, v in enumerate(variables) if out[n] is not None and not isinstance(v, ReplicaShardedVariable)]
    if not summed:
        return out
    summed.reverse()  # The last layers' gradients are known first: they are sent while others are computed.
    dtype = tf.as_dtype(exchange.dtype)
    given = [_cast(out[number], dtype) if dtype.size < 4 else out[number] for number in summed]
    for number, total in zip(summed, _summed(given, exchange.bytes_per_pack), strict=True):
        out[number] = _cast(total, out[number].dtype)
    return out


def _summed(gradients: list, bytes_per_pack: int) -> list:
    dense = not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if dense and collectives.on_cpus_of_one_process():
        # TensorFlow's collectives would keep number and type of a device group's tensors for the process's life.
        return [collectives.all_reduce(gradient) for gradient in gradients]
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients, options)


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    return _mapped(gradient, lambda values: tf.cast(values, dtype))


def _mapped(gradient: Any, function: Callable) -> Any:
    """Applies a function to a gradient's values, of all rows or of some."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def _clipped(optimizer: Any, grads: Sequence, variables: Sequence) -> list:
    """Clips by the norms of whole variables, shards on other replicas included."""
    sharded = any(isinstance(variable, ReplicaShardedVariable) for variable in variables)
    if not sharded or not (optimizer.clipnorm or optimizer.global_clipnorm):
        return list(optimizer._clip_gradients(grads))
    there = [number for number, gradient in enumerate(grads) if gradient is not None]
    squares = {number: _square(grads[number]) for number in there}
    shards = [number for number in there if isinstance(variables[number], ReplicaShardedVariable)]
    if shards:
        totals = collectives.all_reduce(tf.stack([squares[number] for number in shards]))
        squares.update(zip(shards, tf.unstack(totals), strict=True))
    if optimizer.clipnorm:
        most, norms = optimizer.clipnorm, {number: tf.sqrt(square) for number, square in squares.items()}
    else:
        most = optimizer.global_clipnorm
        norms = dict.fromkeys(there, tf.sqrt(tf.add_n(list(squares.values()))))
    out = list(grads)
    for number in there:
        scale = tf.cast(most / tf.maximum(norms[number], most), grads[number].dtype)
        out[number] = _mapped(grads[number], lambda values, scale=scale: values * scale)
    return out


def _square(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32 if values.dtype.size < 4 else values.dtype)))


class _Whole:
    """A sharded variable as an optimizer's `update_step` sees a variable, where it has to see all of it."""

    def __init__(self, variable: ReplicaShardedVariable) -> None:
        self.variable = variable
        self.dtype = variable.value.dtype
        self.shape = tf.TensorShape(variable.shape)
        self._unique_id = variable._value._unique_id  # By which Keras finds its slots.
        self._tensor = variable.gather(tf.convert_to_tensor(variable.value))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self._tensor

    def assign_sub(self, value: tf.Tensor) -> None:
        self.variable.value.assign_sub(self.variable.shard_of(value))


def _accumulated(optimizer: Any, grads: Sequence, variables: Sequence, *, wholes: bool = False) -> None:
    """What Keras does in branches, by each replica for itself: gradients are sums already, or wholes."""
    steps = optimizer.gradient_accumulation_steps or 1
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables] if steps > 1 else []
    if steps > 1:
        # Clipped outside of the branch: it takes a sum over replicas.
        grads = [gradient + total for gradient, total in zip(grads, sums, strict=True)]
    shares = [gradient / steps for gradient in grads]
    clipped = list(optimizer._clip_gradients(shares)) if wholes else _clipped(optimizer, shares, variables)
    # Gathered outside of the branch.
    seen = [_Whole(v) if wholes and isinstance(v, ReplicaShardedVariable) else v.value for v in variables]

    def update() -> None:
        if type(optimizer).__name__ == "Muon":  # Which has its own, by variable.
            optimizer._apply_weight_decay(variables)
        elif optimizer.weight_decay is not None:
            for variable in variables:
                if optimizer._use_weight_decay(variable):
                    rate = tf.cast(optimizer.learning_rate * optimizer.weight_decay, variable.dtype)
                    variable.value.assign_sub(variable.value * rate)
        for gradient, variable in zip(clipped, seen, strict=True):
            optimizer.update_step(gradient, variable, optimizer.learning_rate)
        for total in sums:
            total.value.assign(tf.zeros_like(total.value))

    def wait() -> None:
        for gradient, total in zip(grads, sums, strict=True):
            total.value.assign(gradient)

    if steps > 1:
        tf.cond(tf.equal((optimizer._iterations + 1) % steps, 0), update, wait)
    else:
        update()
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
        frequency = optimizer.ema_overwrite_frequency
        if frequency:
            tf.cond(
                tf.equal((optimizer.iterations + 1) % frequency, 0),
                lambda: _overwrite_with_averages(optimizer),
                lambda: None,
            )


def _overwrite_with_averages(optimizer: Any) -> None:
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    for variable, average in pairs:
        variable.value.assign(average.value)


def _slot(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a sharded variable's slots, such as its momentum, shards where its own are."""
    whole = type(optimizer).__name__ in _WHOLE and args[:1] != ("average",) and kwargs.get("name") != "average"
    if whole or not isinstance(reference_variable, ReplicaShardedVariable):
        return original(optimizer, reference_variable, *args, **kwargs)
    return _sharded_slot(optimizer, reference_variable, *args, **kwargs)


def _sharded_slot(
    optimizer: Any, reference: ReplicaShardedVariable, name: str | None = None, initializer: Any = "zeros"
) -> ReplicaShardedVariable:
    with reference.strategy.scope(), keras.name_scope(optimizer.name):
        variable = ReplicaShardedVariable(
            keras.initializers.get(initializer),
            tuple(reference.shape),
            axis=reference.axis,
            repeats=name != "average",  # It is put in the place of weights, which end in zeros.
            dtype=reference.dtype,
            trainable=False,
            name=f"{reference.path}_{name}".replace("/", "_"),
        )
    optimizer._track_variable(variable)
    return variable
