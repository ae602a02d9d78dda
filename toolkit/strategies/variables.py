"""The variables and optimizers of a model, and those that were made outside of the strategy's scope."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.context import this_step
from toolkit.strategies.options import options_of
from toolkit.strategies.upstream import train_function
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.support.graphs import outside

# The optimizers of a model: Keras's own, and those that a model with its own `train_step` keeps, such as a GAN.


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers among a model's attributes; the compiled one is the first.

    Those in lists, dicts and the user's own objects, such as a trainer, are among them.
    """
    kept: list[Any] = []
    for value in (getattr(model, "optimizer", None), *vars(model).values()):
        if isinstance(value, (dict, list, tuple)):
            kept.extend(value.values() if isinstance(value, dict) else value)
        else:
            kept += [value, *(vars(value).values() if _is_helper(value) else ())]
    return list({id(each): each for each in kept if isinstance(each, keras.optimizers.Optimizer)}.values())


def _is_helper(value: Any) -> bool:
    """Whether the class of an object is neither Keras's nor TensorFlow's."""
    ours = ("builtins", "keras", "tensorflow", "numpy", "toolkit", "types")
    known = any(kind.__module__.partition(".")[0] in ours for kind in type(value).__mro__[:-1])
    return hasattr(value, "__dict__") and not known


def is_built(model: keras.Model) -> bool:
    """Whether a model has all its variables: after `build`, a model says that it is built but may have none yet."""
    return model.built and all(getattr(layer, "built", True) for layer in layers_within(model))


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables for which an optimizer was built; Keras has no public name for them."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def is_table(name: str | None) -> bool:
    """Returns whether a variable of that name is a table, of whose gradient a step has only the rows it looks up."""
    return name == "embeddings"


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of a model and of its optimizers."""
    return [*model.weights, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]


# Variables that were created outside of `strategy.scope()`: a model, a backbone or metrics loaded before the strategy.
#
# Replicas would each assign such a variable, which moves twice as far; workers would each train their own, and
# parameter servers can't hold it. So they are made again in the scope, with the same values, before a model's first
# step. What a user holds stays true: the Keras variable is the same object, and the first replica's copy of what it
# holds is the user's own `tf.Variable`, so that functions that were traced with it go on reading what is trained.


def recreate_in_scope(model: keras.Model) -> None:
    """Recreates a model's variables, its metrics' and its optimizers' in the strategy that will train it.

    That is the strategy it was made under, or else the one in scope. It does nothing where none is made outside.

    Args:
        model: A model, before its first step under that strategy.

    Raises:
        StrategyError: An optimizer that was used outside of the scope keeps whole what replicas are to keep in parts.
    """
    strategy = model._distribute_strategy or tf.distribute.get_strategy()
    if not mesh.is_toolkit_strategy(strategy):
        return
    made_outside = model._distribute_strategy is None
    for each in layers_within(model):
        if isinstance(each, keras.Model) and each._distribute_strategy is None:
            each._distribute_strategy = strategy
    others = [v for v in _keras_variables(model) if _is_outside(v._value, strategy)]
    plain = [each for each in tensorflow_variables(model) if _is_outside(each[2], strategy)]
    if others or plain or made_outside:
        # What was traced before belongs to no strategy.
        train_function.replace(model, train=None, test=None, predict=None)
    for optimizer in optimizers_of(model):
        _check_whole(optimizer, others, strategy)
        _move(optimizer, strategy)
    values = [v._value for v in others] + [value for *_, value in plain]
    made = iter(_made_again(values, strategy) if values else ())
    for variable in others:
        variable._value = next(made)
    for holder, name, _ in plain:
        vars(holder)[name] = next(made)
    if others and hasattr(strategy, "replace_functions"):
        for optimizer in optimizers_of(model):
            _key_again(optimizer)


def recreate_with(optimizer: Any, variables: Sequence) -> None:
    """Recreates an optimizer in the strategy of what it is to train, before it is built, if it was made outside.

    That is the strategy in scope, or else the one that the variables were made under. In a replica it does nothing.

    Args:
        optimizer: On a model or not.
        variables: Those that it is to train. Such as were made outside are recreated, too.
    """
    if this_step.strategy is not None or mesh.is_toolkit_strategy(optimizer._distribution_strategy):
        return
    of_variables = (getattr(getattr(each, "_value", each), "distribute_strategy", None) for each in variables)
    every = [tf.distribute.get_strategy()] if tf.distribute.has_strategy() else of_variables
    strategy = next((each for each in every if mesh.is_toolkit_strategy(each)), None)
    if strategy is None:
        return
    _move(optimizer, strategy)
    others = [v for v in (*optimizer.variables, *variables) if _is_outside(getattr(v, "_value", None), strategy)]
    for variable, value in zip(others, _made_again([v._value for v in others], strategy), strict=True):
        variable._value = value


def refuse_outside(optimizer: Any, variables: list[Any]) -> None:
    """Raises in a step whose replicas would train or use a variable from outside of the scope.

    Args:
        optimizer: The one that is to update the variables.
        variables: Variables of Keras.

    Raises:
        StrategyError: One of either was made outside of the scope.
    """
    strategy = tf.distribute.get_strategy()
    for each in [*variables, *optimizer.variables]:
        if _is_outside(getattr(each, "_value", None), strategy):
            raise StrategyError(
                asked=f"{type(optimizer).__name__} was to update {each.path} "
                f"on {mesh.replica_count(strategy)} replicas",
                found="that variable was made outside of strategy.scope(), so each replica would update it",
                remedy="Make the model, its optimizer and what it wraps in `with strategy.scope():`",
            )


def _move(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Makes an optimizer, and what it wraps, create variables under a strategy."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._distribution_strategy = strategy


def _keras_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables of a model, its metrics and its optimizers."""
    every = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    every += [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    return list({id(each): each for each in every}.values())


def tensorflow_variables(model: keras.Model) -> Iterator[tuple[Any, str, tf.Variable]]:
    """Yields each `tf.Variable` that is an attribute of a layer: the layer, the name, and the variable."""
    for layer in layers_within(model):
        for name, value in list(vars(layer).items()):
            if isinstance(value, tf.Variable):
                yield layer, name, value


def _is_outside(value: Any, strategy: tf.distribute.Strategy) -> bool:
    if not isinstance(value, tf.Variable) or isinstance(value, tf.distribute.DistributedValues):
        return False
    return hasattr(value, "_distribute_strategy") and not strategy.extended.variable_created_in_scope(value)


def _made_again(values: list[tf.Variable], strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns a strategy's variables with these values, which are copied if the device is the same one."""
    # In a thread outside of any scope, because the copies must be created below the strategy.
    return outside(lambda: [_one_made_again(value, strategy) for value in values])


def _one_made_again(value: tf.Variable, strategy: tf.distribute.Strategy) -> tf.Variable:
    left = [] if hasattr(strategy, "replace_functions") else [value]  # Parameter servers hold none of the chief's.

    def reuse(next_creator: Callable, **kwargs: Any) -> Any:
        made = next_creator(**kwargs)
        if not left or made.device != value.device:
            return made
        value.assign(made)  # With several workers, the first one's.
        return left.pop()

    with tf.variable_creator_scope(reuse), strategy.scope():
        return tf.Variable(
            lambda: tf.identity(value.read_value()),
            shape=value.shape,
            dtype=value.dtype,
            trainable=value.trainable,
            name=value.name.partition(":")[0],
            aggregation=value.aggregation,
            synchronization=value.synchronization,
        )


def _check_whole(optimizer: Any, others: list[Any], strategy: tf.distribute.Strategy) -> None:
    """Refuses whole optimizer state where it should be sharded."""
    among = {id(each) for each in others}
    if not among or options_of(strategy).optimizer_state != "sharded" or not optimizer.built:
        return
    if any(id(each) in among and each.shape.rank for each in optimizer.variables):
        raise StrategyError(
            asked='a model that was compiled and used outside of strategy.scope(), with optimizer_state="sharded"',
            found=f"its {type(optimizer).__name__} keeps whole what each replica is to keep a part of",
            remedy="Make and compile the model in `with strategy.scope():`, and load its weights there",
        )


def _key_again(optimizer: Any) -> None:
    """Tells an optimizer about replaced variables, by which Keras knows them, under their old numbers."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None and each.built and hasattr(each, "_trainable_variables_indices"):
            each._trainable_variables_indices = {
                each._var_key(variable): number for number, variable in enumerate(each._trainable_variables)
            }
