"""What a step changes: the variables of a model, its optimizers and its metrics, and what they hold."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.step.sharded_variable import ReadTogether
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.strategies.variables import keras_variables, optimizers_of, tensorflow_variables


class Of(enum.Enum):
    """What a tensor belongs to, in the order in which a step's are named: the nearest to the cause first."""

    OUTPUT = "an output of a layer"
    GRADIENT = "a gradient"
    SLOT = "the optimizer's"
    WEIGHT = "a weight"
    STATE = "a state"
    METRIC = "a metric's"
    LOG = "a log"


@dataclasses.dataclass
class Held:
    """A variable of a script's.

    Attributes:
        name: Such as "sequential/dense/kernel".
        of: What it belongs to.
        variable: Keras's; None for a `tf.Variable` that stands in no Keras variable.
        holder: Whose attribute that is; None for one that the step has by itself.
        attribute: The attribute's name.
        value: The `tf.Variable`, which may be one for each replica.
        is_moved: Whether it is a weight, which a rounding may move.
        of_mean: Whether it is a mean's: of one number for a batch replicas count each, and the mean is the same.
    """

    name: str
    of: Of
    variable: Any
    holder: Any = None
    attribute: str = ""
    value: Any = None
    is_moved: bool = False
    of_mean: bool = False

    def copies(self) -> list[np.ndarray]:
        """Returns what each replica of this process has of it; one value of what is added up over replicas.

        With several processes it is a collective.
        """
        if isinstance(self.variable, ReadTogether):
            return [self.variable.numpy()]
        held = self.value if self.variable is None else self.variable._value
        if not isinstance(held, tf.distribute.DistributedValues):
            return [held.numpy()]
        if held.synchronization == tf.VariableSynchronization.ON_READ:
            if held.aggregation in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN):
                return [held.value().numpy()]
            if held.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
                return [held.distribute_strategy.experimental_local_results(held)[0].numpy()]
        return [each.numpy() for each in held.distribute_strategy.experimental_local_results(held)]

    def parts(self) -> list[tf.Variable]:
        """Returns this process's variables of it: one for each replica, or one."""
        held = self.value if self.variable is None else self.variable._value
        if not isinstance(held, tf.distribute.DistributedValues):
            return [held]
        return list(held.distribute_strategy.experimental_local_results(held))

    @property
    def differs_by_replica(self) -> bool:
        """Whether replicas have other values of it by right, as of a sum or a shard."""
        held = self.value if self.variable is None else self.variable._value
        read = getattr(held, "synchronization", None) == tf.VariableSynchronization.ON_READ
        return isinstance(self.variable, ReadTogether) or read


class Saved:
    """What variables held at some time, by replica.

    Args:
        variables: The variables.
    """

    def __init__(self, variables: Sequence[Held]) -> None:
        self._kept = []
        for held in variables:
            parts = held.parts()
            values = [each.numpy() for each in (parts if held.differs_by_replica else parts[:1])]
            self._kept.append((parts, values))

    def put_back(self) -> None:
        """Sets the variables to it."""
        for parts, values in self._kept:
            for number, part in enumerate(parts):
                part.assign(values[min(number, len(values) - 1)])


def held_by(model: keras.Model, generators: Sequence[Any] = ()) -> list[Held]:
    """Returns the variables of a model, its metrics and its optimizers.

    Args:
        model: Built and compiled.
        generators: Seed generators that the model doesn't have, such as that for calls without a seed.
    """
    every_metric = [part for each in model.metrics for part in _with_parts(each)]
    weights, metrics = {id(v) for v in model.weights}, {id(v) for each in every_metric for v in each.variables}
    means = {id(v) for each in every_metric if isinstance(each, keras.metrics.Mean) for v in each.variables}
    slots = {id(v): each.name for each in optimizers_within(model) for v in each.variables}

    def one(variable: Any) -> Held:
        key = id(variable)
        if key in slots and key not in weights:
            return Held(f"{slots[key]}: {variable.path.partition('/')[2] or variable.path}", Of.SLOT, variable)
        if key in metrics:
            return Held(f"metric {variable.path}", Of.METRIC, variable, of_mean=key in means)
        trains = bool(variable.trainable)
        floating = tf.as_dtype(variable.dtype).is_floating
        return Held(variable.path, Of.WEIGHT if trains else Of.STATE, variable, is_moved=key in weights and floating)

    every = keras_variables(model)
    every += [v for each in (*every_metric, *optimizers_within(model)) for v in each.variables]
    every = list({id(each): each for each in every}.values())
    found = [one(each) for each in every]
    others = [each.state for each in generators if all(each.state is not known for known in every)]
    found += [Held("the seed of calls without one", Of.STATE, each) for each in others]
    plain = {id(v._value) for v in every}
    return found + [
        Held(f"{layer.name}.{name}", Of.STATE, None, layer, name, value)
        for layer, name, value in tensorflow_variables(model)
        if id(value) not in plain
    ]


def _with_parts(metric: Any) -> Iterator[Any]:
    yield metric
    for part in metric._metrics:
        yield from _with_parts(part)


def optimizers_within(model: keras.Model) -> list[Any]:
    """Returns the optimizers among the attributes of a model and of its layers."""
    found = [each for layer in layers_within(model) for each in optimizers_of(layer)]
    return list({id(each): each for each in found}.values())


def models_within(model: keras.Model) -> list[Any]:
    """Returns a model and the models among its layers."""
    return [each for each in layers_within(model) if isinstance(each, keras.Model)]
