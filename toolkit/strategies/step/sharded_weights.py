"""Fully sharded weights (ZeRO stage 3, FSDP): layers of any class, of whose weights each replica keeps a part.

Rajbhandari et al., arXiv 1910.02054, stage 3. At rest a weight lies flat, in shards, among the replicas of a group. A
step reads the whole, which its replicas gather where the weight is read, in the dtype in which the layer computes. The
gradient of a gather is a reduce-scatter: of the gradients that replicas have of the whole, weighted by their shares of
the batch, each gets its shard's sum. Optimizers are given shards, and keep slots for them.

    shard  ->  all-gather: the whole  ->  the layer  ->  its gradient g_r  ->  * w_r  ->  reduce-scatter

A weight is made in shards, in `Layer.add_weight`: each process draws the whole, which no variable ever holds, and the
chief sends its own shard by shard. So the initial value is one device's. Outside of steps a weight reads as the whole.
"""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Layout, is_of_whole, layout_of
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import set_to_chiefs
from toolkit.strategies.step import collectives
from toolkit.strategies.step.gradients import sent_as
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.upstream import private, replaced
from toolkit.strategies.variables import is_table

_LOG = logging.getLogger(__name__)
SMALLEST = 2048  # Elements. An exchange of fewer takes longer than the memory is worth.
_LARGE = 1 << 20  # Bytes.
_LAYOUT = Layout(axis=None, used_whole=True)
_NOTED = "_toolkit_noted_shards"


class ShardedWeight(ReplicaShardedVariable):
    """A weight that each replica keeps a shard of, and that reads as the whole.

    Only what updates it, with `this_step.by_shard`, reads this replica's shard.
    """

    @property
    def value(self) -> Any:
        """The whole: in a step gathered by its replicas; the shard where the step is by shard."""
        if self._value is None or self._plain is not None or this_step.by_shard:
            return super().value
        scope = private.global_state.get_global_attribute("stateless_scope")
        known = scope.get_current_value(self) if scope is not None else None
        if known is not None:
            return self._maybe_autocast(known)
        if this_step.recorded is not None:  # Without values: the same on all replicas, and it depends on no example.
            return self._maybe_autocast(tf.broadcast_to(tf.reshape(self.shards[0], [-1])[0], self._shape))
        if this_step.strategy is self.strategy and this_step.count > 1:
            return self._in_step()
        return self._maybe_autocast(self.whole())

    @property
    def handle(self) -> Any:
        """By which a tape knows it: that of this replica's shard."""
        return self._value.handle

    def assign(self, value: Any) -> Any:
        """As of `ReplicaShardedVariable`; what a stateless scope takes is the whole."""
        if private.global_state.get_global_attribute("stateless_scope") is not None:
            return keras.Variable.assign(self, value)
        return super().assign(value)

    def _initialize_with_initializer(self, initializer: Callable) -> None:
        # Each process draws the whole, as one device does, so that all go on alike. The chief's value counts.
        whole = np.asarray(_drawn(initializer, tuple(self._shape), self._dtype))  # It sees the tensor's own memory.
        # A layer that is frozen by now may be trained later: a tape knows TensorFlow's variable, and it stays this one.
        self._make_shards(trainable=tf.as_dtype(self._dtype).is_floating)
        for number in range(self.count):
            self._set_to_chiefs(number, self._cut(whole, number))
        del whole
        if _bytes(self) >= _LARGE:
            _give_back()

    def _set_to_chiefs(self, number: int, value: np.ndarray) -> None:
        """Sets this process's shards of that number to the chief's value."""
        set_to_chiefs(self.strategy, value)
        for replica_id, shard in self._own_shards():
            if replica_id % self.count == number:
                shard.assign(value)

    def _in_step(self) -> tf.Tensor:
        """Returns the whole, with a gradient of which each replica gets its shard's sum."""
        collectives.check_piece()
        dtype = tf.as_dtype(self.dtype)
        with _in_graph_of_step():  # Also for a branch or a loop, where replicas can't meet.
            shard = self._value.read_value()
            # In one process the gather is traced in another thread, where a replica's control dependencies don't apply.
            with tf.control_dependencies(this_step.waits):
                whole = _gathered(self, tf.identity(shard), dtype)
            if this_step.gathers is not None:
                this_step.gathers.add(whole, lambda shard: self.gather_anywhere(tf.cast(shard, dtype)), shard)
            return whole


@contextlib.contextmanager
def _in_graph_of_step() -> Iterator[None]:
    graph = this_step.graph
    if graph is None or tf.compat.v1.get_default_graph() is graph:
        yield
        return
    with graph.as_default():
        yield


def _drawn(initializer: Callable, shape: tuple[int, ...], dtype: str) -> Any:
    """Returns what an initializer makes, in less memory where that is the same bit for bit.

    A draw takes three times the weight's memory, because each of its operations keeps its input. In a graph, an
    operation may write over it. An initializer that isn't Keras's could draw other numbers there.
    """
    draw = functools.partial(initializer, shape, dtype=dtype)
    if type(initializer).__module__.startswith("keras.") and isinstance(getattr(initializer, "seed", None), int):
        draw = tf.function(draw, autograph=False).get_concrete_function()
    return draw()


def _give_back() -> None:
    """Returns to the system what wholes have left: shards lie between, and the C library would keep it."""
    with contextlib.suppress(AttributeError, OSError):  # Only the GNU C library has this.
        ctypes.CDLL(None).malloc_trim(0)


def _gathered(variable: ShardedWeight, shard: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    @tf.custom_gradient
    def gather(shard: tf.Tensor) -> tuple:
        with private.stop_recording():
            whole = variable.gather_anywhere(tf.cast(shard, dtype))
        return whole, lambda upstream: _scattered(variable, upstream)

    return gather(shard)


def _scattered(variable: ShardedWeight, upstream: Any) -> tf.Tensor:
    """Returns the shard of the whole batch's gradient, from this replica's of the whole."""
    share, graph = this_step.share, this_step.graph
    if graph is not None and tf.compat.v1.get_default_graph() is not graph:
        raise StrategyError(
            asked=f"the gradient of {variable.path}, a sharded weight, in a branch, a loop or a function of the step",
            found="replicas exchange it where it is computed, and they can't meet there",
            remedy='Call tape.gradient outside of it, or leave weights="sharded" out',
        )
    whole = tf.cast(tf.convert_to_tensor(upstream), variable._value.dtype)
    if share is not None and not share.in_loss:  # A replica without examples has no mean: 0 / 0.
        whole = tf.math.multiply_no_nan(whole, tf.cast(share.exchanged_weight, whole.dtype))

    if this_step.gathers is not None:
        this_step.gathers.gradients.append(whole)

    def _refuse(*_: Any) -> None:
        raise StrategyError(
            asked=f"the gradient of {variable.path}, a sharded weight, is differentiated once more",
            found="each replica has a shard of that gradient only",
            remedy='Leave weights="sharded" out for a step that differentiates gradients by weights',
        )

    if not private.could_possibly_record():
        return variable.scatter(whole, sent_as())

    @tf.custom_gradient
    def scatter(whole: tf.Tensor) -> tuple:
        return variable.scatter(whole, sent_as()), _refuse

    return scatter(whole)


# What is done with gradients of shards between a tape and an optimizer.
#
# The tape of a step that only hands them on returns those of shards. A step that may read them, such as to clip them by
# their norm, is given those of whole weights, of which an optimizer takes the shards again. In one's own loop that is
# `batch_gradients`.


_MARK = "_toolkit_of_shard"


def of_shards(original: Callable, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `tf.GradientTape.gradient` does, with gradients of shards known as such, and less memory."""
    with contextlib.nullcontext() if this_step.gathers is None else this_step.gathers.again():
        found = original(tape, target, sources, *args, **kwargs)
    for gradient, variable in zip(tf.nest.flatten(found), tf.nest.flatten(sources), strict=True):
        if gradient is not None and _is_of_shard(gradient, variable):
            setattr(gradient, _MARK, True)
    return found


def handed_on(gradients: Sequence, variables: Sequence, *, whole: bool) -> list:
    """Returns gradients of all replicas as a script is given them.

    Args:
        gradients: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: Keras variables.
        whole: Whether those of shards are gathered.
    """

    def one(gradient: Any, variable: Any) -> Any:
        if gradient is None or not _is_of_shard(gradient, variable):
            return gradient
        if whole:
            return variable.gather(gradient)
        setattr(gradient, _MARK, True)
        return gradient

    return [one(*pair) for pair in zip(gradients, variables, strict=True)]


def _is_of_shard(gradient: Any, variable: Any) -> bool:
    return layout_of(variable).used_whole and not is_of_whole(gradient, variable)


def check_untouched(gradients: Sequence, variables: Sequence) -> None:
    """Refuses gradients of shards that were changed since a tape returned them: a norm of one is no weight's.

    Raises:
        StrategyError: One was.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and _is_of_shard(gradient, variable) and not hasattr(gradient, _MARK):
            raise StrategyError(
                asked=f"an optimizer was given a gradient of {variable.path}, of which each replica has a shard",
                found="it was changed since tape.gradient returned it",
                remedy="In your own loop, change what toolkit.strategies.batch_gradients returns, or clip by the "
                "optimizer's global_clipnorm or clipnorm",
            )


def shards_of_alike(gradients: Sequence, variables: Sequence, alike: Collection[int]) -> list:
    """Returns exchanged gradients, with shards of what all have whole, such as what a step has clipped.

    Args:
        gradients: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: Keras variables.
        alike: The numbers of those that all replicas have alike.
    """
    return [
        variable.shard_of(tf.convert_to_tensor(gradient))
        if number in alike and gradient is not None and is_of_whole(gradient, variable)
        else gradient
        for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
    ]


# When weights are gathered.


def call_layer(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer, of whose weights the gathers wait for its inputs: TensorFlow would start all at once."""
    given = keras.tree.flatten((args, kwargs))
    waits = tuple(each for each in given if isinstance(each, tf.Tensor) and each.graph is this_step.graph)
    with this_step.having(waits=waits or this_step.waits):
        return original(layer, *args, **kwargs)


# Which weights are cut.


def add_weight(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a layer's weight, in shards if it is one that replicas are to keep so."""
    given = {**dict(zip(("shape", "initializer", "dtype", "trainable"), args, strict=False)), **kwargs}
    strategy = tf.distribute.get_strategy()
    if not (shards_weights(strategy) and tf.distribute.in_cross_replica_context() and _is_cut(layer, **given)):
        return original(layer, *args, **kwargs)
    replaced.LAYER.answer(weights=call_layer)
    with keras.StatelessScope():  # Keras makes the value when this is left, by the class that the variable then has.
        variable = original(layer, *args, **kwargs)
        # `add_weight` makes each variable of one class, and by now the layer and its tracker hold the object.
        variable.__class__ = ShardedWeight
        variable._lay_out(tuple(variable.shape), _LAYOUT)
    return variable


def shards_weights(strategy: Any) -> bool:
    """Returns whether replicas of a strategy keep shards of weights."""
    return options_of(strategy).weights == "sharded" and mesh.mesh_of(strategy).shards > 1


def _is_cut(
    layer: Any,
    *,
    shape: Any = (),
    dtype: Any = None,
    trainable: bool = True,
    aggregation: str | None = "none",
    overwrite_with_gradient: bool = False,
    name: str | None = None,
    **_: Any,
) -> bool:
    """Whether replicas are to keep shards of a weight, by what `add_weight` is given.

    What a layer makes as not trainable are statistics, which steps set, or 8 bits for each weight, or for two.
    """
    kind = tf.as_dtype(dtype or layer.variable_dtype)
    quantized = not trainable and kind in (tf.int8, tf.uint8)
    frozen = quantized or not layer.trainable
    return (
        (quantized or (trainable and kind.is_floating))
        and (tf.TensorShape(shape).num_elements() or 0) >= SMALLEST
        and aggregation in (None, "none")
        and not overwrite_with_gradient
        # The whole gradient of a table, and all its rows gathered, would take more memory than its rows.
        and (frozen or not is_table(name))
    )


def note_shards(model: Any) -> None:
    """Says once how much of a model's weights is in shards, and what stays whole."""
    if vars(model).get(_NOTED) or not shards_weights(model.distribute_strategy):
        return
    object.__setattr__(model, _NOTED, True)
    count = mesh.mesh_of(model.distribute_strategy).shards
    cut = [each for each in model.weights if layout_of(each).used_whole]
    whole = [each for each in model.weights if not layout_of(each).in_shards and int(np.prod(each.shape)) >= SMALLEST]
    total = sum(map(_bytes, model.weights))
    kept = sum(_bytes(each) // count for each in cut)
    _LOG.info(
        'weights="sharded": %s of %s of weights are kept in shards, %s on each of %d replicas; %s',
        *(_size(sum(map(_bytes, cut))), _size(total), _size(kept), count),
        f"whole stay small ones and {', '.join(each.path for each in whole[:3])}{' and others' * (len(whole) > 3)}"
        if whole
        else "small ones stay whole",
    )


def _bytes(variable: Any) -> int:
    return int(np.prod(variable.shape)) * tf.as_dtype(variable._dtype).size


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
