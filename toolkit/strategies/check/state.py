"""What a step changes: the variables of a model, its optimizers and its metrics, and what they hold."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.step.sharded_variable import ReadTogether
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.strategies.variables import optimizers_of, tensorflow_variables


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


class Objects:
    """The objects of Keras's that a step uses.

    Args:
        layers: Layers and models; those within them are among them then.
        optimizers: Beside those that layers keep.
        metrics: Beside those of models.
        variables: Keras variables and `tf.Variable`s that no other object has.

    Attributes:
        layers: All of them.
        models: Those that are models.
        optimizers: All of them.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        optimizers: Sequence[Any] = (),
        metrics: Sequence[Any] = (),
        variables: Sequence[Any] = (),
    ) -> None:
        self._top, self._loose = list(layers), list(variables)
        self.layers = _once(each for layer in layers for each in layers_within(layer))
        self.models = [each for each in self.layers if isinstance(each, keras.Model)]
        self.optimizers = _once((*(one for each in self.layers for one in optimizers_of(each)), *optimizers))
        of_models = (metric for each in self.models for metric in each.metrics)
        self._metrics = _once(part for each in (*of_models, *metrics) for part in _with_parts(each))

    def held(self, generators: Sequence[Any] = ()) -> list[Held]:
        """Returns the variables of these objects.

        Args:
            generators: Seed generators that no layer has, such as that for calls without a seed.
        """
        weights = {id(v) for each in self._top for v in each.weights}
        metrics = {id(v) for each in self._metrics for v in each.variables}
        means = {id(v) for each in self._metrics if isinstance(each, keras.metrics.Mean) for v in each.variables}
        slots = {id(v): each.name for each in self.optimizers for v in each.variables}

        def one(variable: Any) -> Held:
            key = id(variable)
            if key in slots and key not in weights:
                return Held(f"{slots[key]}: {variable.path.partition('/')[2] or variable.path}", Of.SLOT, variable)
            if key in metrics:
                return Held(f"metric {variable.path}", Of.METRIC, variable, of_mean=key in means)
            trains = bool(variable.trainable)
            floating = tf.as_dtype(variable.dtype).is_floating
            return Held(
                variable.path, Of.WEIGHT if trains else Of.STATE, variable, is_moved=key in weights and floating
            )

        owners = (*self._top, *self._metrics, *self.optimizers)
        every = _once(
            (
                *(v for each in owners for v in each.variables),
                *(v for v in self._loose if isinstance(v, keras.Variable)),
            )
        )
        found = [one(each) for each in every]
        others = [each.state for each in generators if all(each.state is not known for known in every)]
        found += [Held("the seed of calls without one", Of.STATE, each) for each in others]
        plain = {id(each._value) for each in every}
        return found + [
            Held(f"{layer.name}.{name}", Of.STATE, None, layer, name, value)
            for top in self._top
            for layer, name, value in tensorflow_variables(top)
            if id(value) not in plain
        ]


def of_model(model: keras.Model) -> Objects:
    """Returns the objects that a model's step uses."""
    return Objects([model])


def _once(things: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in things}.values())


def _with_parts(metric: Any) -> Iterator[Any]:
    yield metric
    for part in metric._metrics:
        yield from _with_parts(part)
