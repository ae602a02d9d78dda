"""How gradients travel between replicas, and what an optimizer does with them there.

Keras's optimizers sum every gradient over all replicas. Here parts of sharded variables stay where they are, numbers
may travel in 16 bits and in packs, the last layers' first; and what Keras does before that sum is done after it: the
norm by which gradients are clipped is that of the sum, as on one device.

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
from toolkit.strategies.sharded import ShardedVariable
from toolkit.support.wrapping import wrap

__all__ = ["adapt_optimizers", "reduced"]

# They look at a layer's variable as a whole: it is gathered for them, and each replica has all of its slots.
_WHOLE = ("Adafactor", "Lamb", "Muon")
_here = threading.local()


def adapt_optimizers() -> None:
    """Has Keras's optimizers do so, on several replicas; calling it again changes nothing."""
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
    if collectives.place()[1] == 1:
        original(optimizer, grads, trainable_variables)
        return
    variables = list(trainable_variables)
    grads = reduced(grads, variables)
    if _wants_wholes(optimizer, variables):
        _accumulated(optimizer, _wholes(grads, variables), variables, wholes=True)
        return
    overwriting = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if not optimizer.gradient_accumulation_steps and not overwriting:
        grads = _clipped(optimizer, grads, variables)
        _here.reduced = True
        try:
            original(optimizer, grads, variables)
        finally:
            _here.reduced = False
        return
    # Keras puts these into a branch, from which tf.distribute can't call all replicas together. Each replica can
    # update its own copies by itself, once gradients are summed.
    _accumulated(optimizer, grads, variables)


def reduced(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients summed over all replicas; those of parts are left as they are.

    Args:
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: Keras's.
    """
    exchange = exchange_of(tf.distribute.get_strategy())
    out = list(grads)
    pairs = enumerate(zip(grads, variables, strict=True))
    summed = [
        n for n, (gradient, variable) in pairs if gradient is not None and not isinstance(variable, ShardedVariable)
    ]
    if not summed:
        return out
    summed.reverse()  # The last layers' gradients are known first: they travel while others are computed.
    travels = tf.as_dtype(exchange.dtype)
    shorten = travels.size < 4
    given = [_cast(out[number], travels) if shorten else out[number] for number in summed]
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
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def _clipped(optimizer: Any, grads: Sequence, variables: Sequence) -> list:
    """Clips by the norms of whole variables, parts on other replicas included."""
    if not any(isinstance(variable, ShardedVariable) for variable in variables):
        return list(optimizer._clip_gradients(grads))
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        return list(optimizer._clip_gradients(grads))
    there = [number for number, gradient in enumerate(grads) if gradient is not None]
    squares = {number: _square(grads[number]) for number in there}
    parts = [number for number in there if isinstance(variables[number], ShardedVariable)]
    if parts:
        totals = collectives.all_reduce(tf.stack([squares[number] for number in parts]))
        squares.update(zip(parts, tf.unstack(totals), strict=True))
    if optimizer.clipnorm:
        most, norms = optimizer.clipnorm, {number: tf.sqrt(square) for number, square in squares.items()}
    else:
        most = optimizer.global_clipnorm
        norms = dict.fromkeys(there, tf.sqrt(tf.add_n(list(squares.values()))))
    out = list(grads)
    for number in there:
        scale = tf.cast(most / tf.maximum(norms[number], most), grads[number].dtype)
        out[number] = _scaled(grads[number], scale)
    return out


def _square(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32 if values.dtype.size < 4 else values.dtype)))


def _scaled(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


def _wants_wholes(optimizer: Any, variables: Sequence) -> bool:
    return type(optimizer).__name__ in _WHOLE and any(isinstance(v, ShardedVariable) for v in variables)


def _wholes(grads: Sequence, variables: Sequence) -> list:
    return [
        variable.gathered(gradient) if isinstance(variable, ShardedVariable) and gradient is not None else gradient
        for gradient, variable in zip(grads, variables, strict=True)
    ]


class _Whole:
    """A sharded variable as an optimizer's `update_step` sees a variable, where it has to see all of it."""

    def __init__(self, variable: ShardedVariable) -> None:
        self.variable = variable
        self.dtype = variable.value.dtype
        self.shape = tf.TensorShape(variable.shape)
        self._unique_id = variable._value._unique_id  # By which Keras finds its slots.
        self._tensor = variable.gathered(tf.convert_to_tensor(variable.value))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self._tensor

    def assign_sub(self, value: tf.Tensor) -> None:
        self.variable.value.assign_sub(self.variable.part_of(value))


def _accumulated(optimizer: Any, grads: Sequence, variables: Sequence, *, wholes: bool = False) -> None:
    """What Keras does in branches, by each replica for itself: gradients are sums already, or wholes."""
    steps = optimizer.gradient_accumulation_steps or 1
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables] if steps > 1 else []
    if steps > 1:
        # Clipped outside of the branch: parts of norms travel.
        grads = [gradient + total for gradient, total in zip(grads, sums, strict=True)]
    shares = [gradient / steps for gradient in grads]
    clipped = list(optimizer._clip_gradients(shares)) if wholes else _clipped(optimizer, shares, variables)
    # Gathered outside of the branch.
    seen = [_Whole(v) if wholes and isinstance(v, ShardedVariable) else v.value for v in variables]

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
                _nothing,
            )


def _overwrite_with_averages(optimizer: Any) -> None:
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    for variable, average in pairs:
        variable.value.assign(average.value)


def _nothing() -> None:
    pass


def _slot(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a sharded variable's slots, such as its momentum, parts where its own are."""
    if not isinstance(reference_variable, ShardedVariable):
        return original(optimizer, reference_variable, *args, **kwargs)
    if type(optimizer).__name__ in _WHOLE and args[:1] != ("average",) and kwargs.get("name") != "average":
        return original(optimizer, reference_variable, *args, **kwargs)
    return _sharded_slot(optimizer, reference_variable, *args, **kwargs)


def _sharded_slot(
    optimizer: Any, reference: ShardedVariable, name: str | None = None, initializer: Any = "zeros"
) -> ShardedVariable:
    with reference.strategy.scope(), keras.name_scope(optimizer.name):
        variable = ShardedVariable(
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
