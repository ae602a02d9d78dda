"""Steps without an exchange: replicas train locally, and average their weights every so many steps.

Between two averages replica r makes its own steps from the same weights x to y_r, with n_r examples. Then

    y = sum over r of n_r * y_r / sum over r of n_r
    d = x - y;   v = momentum * v + d;   x' = x - rate * (d + momentum * v)

which is y itself with rate 1 and no momentum (local SGD, Stich, arXiv 1805.09767), and DiLoCo's outer step with 0.7 and
0.9 (Douillard et al., arXiv 2311.08105). Statistics such as those of BatchNormalization are averaged as they are. The
optimizer's own variables, such as momentum, aren't sent: each replica has its own up to the end of an epoch, where they
are averaged too, so that what is saved there is everybody's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.options import LocalSteps, options_of
from toolkit.strategies.step import collectives, overlap
from toolkit.strategies.step.collectives import joined
from toolkit.strategies.step.sharded_variable import ReplicaCopies
from toolkit.strategies.variables import optimizers_of

_ATTRIBUTE = "_toolkit_local"
_ROWS = "_toolkit_rows"  # Of each replica, since the last average.


class Averaging:
    """Stands around a model's step function while replicas train locally, and averages after every so many steps.

    Args:
        model: Built and compiled; all replicas have the same weights.
        local: How often, and how.
        velocities: v of each trainable variable; () without momentum.
        slots: Returns the optimizers' variables; not all need be built before the first step.
        rate: Returns the learning rate.
    """

    def __init__(
        self,
        model: keras.Model,
        local: LocalSteps,
        velocities: Sequence[Any],
        slots: Callable[[], Sequence[Any]],
        rate: Callable[[], float],
    ) -> None:
        self._model, self._local = model, local
        self._weights, self._velocities = list(model.trainable_variables), list(velocities)
        self._statistics = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
        self._slots, self._rate = slots, rate
        self._since = 0
        self._slots_agree = False  # A checkpoint may have set them.
        with model.distribute_strategy.scope():
            self._before = [
                keras.Variable(tf.convert_to_tensor(each), trainable=False, name=f"before_{number}")
                for number, each in enumerate(self._weights)
            ]
        self._begin_round = self._on_replicas(self._take_weights)
        self._remember = self._on_replicas(self._copy_weights)
        self._average = self._on_replicas(self._average_weights)
        self._average_optimizer = self._on_replicas(self._average_slots)
        model.__dict__[_ATTRIBUTE] = self

    def __call__(self, within: Callable, batches: Any) -> Any:
        """Makes a step, and averages if it is due."""
        if not self._since:
            self._begin_round()
        logs = within(batches)
        self._since += self._model.steps_per_execution
        self._slots_agree = False
        if self._since >= self._interval():
            self._since = 0
            self._average()
        return logs

    def agree(self) -> None:
        """Makes all replicas equal, if they aren't. All must call it."""
        if self._since:
            self._since = 0
            self._average()
        if not self._slots_agree:
            self._slots_agree = True
            self._average_optimizer()

    def resume(self) -> None:
        """Takes the current weights, from a checkpoint, as those of the last average."""
        self._remember()

    @property
    def agrees(self) -> bool:
        """Whether all replicas have the same weights."""
        return not self._since

    def _interval(self) -> int:
        """By the quadratic synchronisation rule of Gu et al., arXiv 2310.14423, if that is chosen."""
        if not self._local.quadratic:
            return self._local.every
        return max(self._local.every, int((self._local.quadratic / max(self._rate(), 1e-12)) ** 2))

    def _on_replicas(self, call: Callable[[], None]) -> Callable[[], None]:
        strategy = self._model.distribute_strategy

        @tf.function(reduce_retracing=False)
        @tf.autograph.experimental.do_not_convert
        def run() -> None:
            strategy.run(call)

        return run

    def _take_weights(self) -> None:
        """Begins with the current weights. If a user set them, earlier momentum is dropped."""
        if self._velocities:
            pairs = zip(self._before, self._weights, strict=True)
            same = tf.reduce_all([tf.reduce_all(_read(before) == _read(weight)) for before, weight in pairs])
            for velocity in self._velocities:
                _set(velocity, tf.where(same, _read(velocity), tf.zeros(velocity.shape, velocity.dtype)))
        self._copy_weights()

    def _copy_weights(self) -> None:
        for before, weight in zip(self._before, self._weights, strict=True):
            _set(before, _read(weight))

    def _average_weights(self) -> None:
        local, dtype = self._local, self._local.dtype
        before = [_read(each) for each in self._before]
        rows = self._model.__dict__[_ROWS]
        share = tf.math.divide_no_nan(_read(rows), collectives.all_reduce(_read(rows)))
        _set(rows, tf.zeros([], tf.float32))
        learnt = [(_read(y) - x) * tf.cast(share, x.dtype) for x, y in zip(before, self._weights, strict=True)]
        totals = overlap.summed(learnt, bytes_per_pack=None, dtype=tf.as_dtype(dtype) if dtype != "float32" else None)
        for number, (x, total) in enumerate(zip(before, totals, strict=True)):
            step = down = -total
            if self._velocities:
                velocity = local.outer_momentum * _read(self._velocities[number]) + down
                _set(self._velocities[number], velocity)
                step = down + local.outer_momentum * velocity
            new = x - local.outer_rate * step
            _set(self._weights[number], new)
            _set(self._before[number], new)
        _set_to_means(self._statistics)

    def _average_slots(self) -> None:
        slots = self._slots()
        averaged = [each for each in slots if tf.as_dtype(each.dtype).is_floating and len(each.shape)]
        _set_to_means(averaged)
        # Counts and scales, which may differ after a step that overflowed, are all set to the first replica's.
        ids = {id(each) for each in averaged}
        others = [each for each in slots if id(each) not in ids]
        first = tf.cast(this_step.replica == 0, tf.float64)
        flat, split = joined([first * tf.cast(_read(each), tf.float64) for each in others])
        for variable, value in zip(others, split(collectives.all_reduce(flat)), strict=True):
            _set(variable, value)


def count_rows(model: keras.Model, rows: Any) -> None:
    """Adds the examples of a local step, by which this replica's weights count in the next average."""
    counted = model.__dict__[_ROWS]
    _set(counted, _read(counted) + tf.cast(rows, tf.float32))


def begin(model: keras.Model) -> None:
    """Prepares a model for local steps."""
    if _ROWS not in model.__dict__:
        with model.distribute_strategy.scope():
            model.__dict__[_ROWS] = keras.Variable(0.0, trainable=False, dtype="float32", name="rows")


def resume(model: keras.Model) -> None:
    """Takes the current weights, from a checkpoint, as those of the last average."""
    if (local := model.__dict__.get(_ATTRIBUTE)) is not None:
        local.resume()


def agree(model: keras.Model | None) -> None:
    """Makes the replicas of a model equal if they train locally. All must call it."""
    if model is not None and (local := model.__dict__.get(_ATTRIBUTE)) is not None:
        local.agree()


def agrees(model: keras.Model) -> bool:
    """Returns whether all replicas of a model have the same weights: always, unless they train locally."""
    local = model.__dict__.get(_ATTRIBUTE)
    return local is None or local.agrees


def _set_to_means(variables: Sequence[Any]) -> None:
    count = this_step.count
    totals = overlap.summed([_read(each) for each in variables], bytes_per_pack=None, dtype=None)
    for variable, total in zip(variables, totals, strict=True):
        _set(variable, total / count)


def _read(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(variable)  # This replica's.


def _set(variable: Any, value: tf.Tensor) -> None:
    """Sets this replica's copy."""
    copies = tf.distribute.get_strategy().experimental_local_results(variable.value)
    copies[this_step.replica % len(copies)].assign(tf.cast(value, variable.dtype))


# State that replicas with local steps keep beside their weights.


_VELOCITIES = "_toolkit_velocities"


def per_replica_state(model: keras.Model) -> list[Any]:
    """Returns the variables of which a checkpoint needs all replicas' values: optimizers' variables, and velocities.

    Nothing where they don't train by themselves.
    """
    strategy = model.distribute_strategy
    if options_of(strategy).local is None or replica_count(strategy) == 1 or not model.built:
        return []
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    return [*velocities_of(model), *(ReplicaCopies(variable, strategy) for variable in slots)]


def velocities_of(model: keras.Model) -> list[Any]:
    """Returns the outer step's momentum for each trainable variable of a model; [] without momentum."""
    strategy = model.distribute_strategy
    local = options_of(strategy).local
    if local is None or not local.outer_momentum:
        return []
    # By variable, because trainable variables may change. Keras would take an attribute for the model's own variables.
    kept = model.__dict__.setdefault(_VELOCITIES, {})
    with strategy.scope():
        for variable in model.trainable_variables:
            if id(variable) not in kept:
                kept[id(variable)] = _make(variable)
    return [kept[id(variable)] for variable in model.trainable_variables]


def _make(variable: Any) -> keras.Variable:
    name = f"{variable.path}_velocity".replace("/", "_")
    return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)
