"""The mesh of a strategy's replicas: groups train data parallel, and each group holds one copy of a sharded model.

Replica r is shard r mod `shards` of group r div `shards`. TensorFlow numbers a host's replicas one after another, so a
group stays inside a host where a host has room for whole groups: what is chatty uses the fast link.

How a variable lies on the mesh at rest, and how a step uses it, is its layout. Exchanges, optimizers, saving and
comparing ask it:

    replicated        each replica has all of it, and its gradient is the sum over all replicas
    shard, by shard   a sharded layer's: each replica of a group computes with its own shard
    flat, by shard    an optimizer's slots in parts (ZeRO stage 1): only the optimizer uses them
    flat, whole       fully sharded weights: gathered to the whole wherever a step reads them
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.options import options_of, set_options


class Among(enum.Enum):
    """Which replicas exchange with one another."""

    ALL = "all replicas"
    GROUP = "the replicas that hold one copy of a sharded model between them"
    PEERS = "the replicas that hold the same shard, one of each group"


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How replicas are divided into groups.

    Attributes:
        shards: Replicas of a group.
        groups: How many groups there are.
    """

    shards: int
    groups: int

    def members(self, replica: int, among: Among) -> list[int]:
        """Returns the replicas, by id and in order, that exchange with this one, itself included."""
        group, shard = divmod(replica, self.shards)
        if among is Among.ALL:
            return list(range(self.shards * self.groups))
        if among is Among.GROUP:
            return list(range(group * self.shards, (group + 1) * self.shards))
        return list(range(shard, self.shards * self.groups, self.shards))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A variable's layout.

    Attributes:
        in_shards: Whether each replica has a shard. Its gradient is then that of the shard, and no other replica's.
        axis: The axis along which the whole is cut; None for the whole laid out flat.
        among: The replicas that have a shard each.
        repeats: Whether the last shards are padded with the whole's last value in the place of zeros: an optimizer
            such as Ftrl divides by it.
        used_whole: Whether a step reads the whole. An optimizer is given the shard.
    """

    in_shards: bool = True
    axis: int | None = None
    among: Among = Among.GROUP
    repeats: bool = False
    used_whole: bool = False


REPLICATED = Layout(in_shards=False)


def layout_of(variable: Any) -> Layout:
    """Returns the layout of a variable, of Keras or of TensorFlow."""
    return getattr(variable, "laid_out", REPLICATED)


def is_of_whole(gradient: Any, variable: Any) -> bool:
    """Returns whether a gradient is that of the whole of a variable that steps use whole, and not of its shard.

    Args:
        gradient: A tensor or `tf.IndexedSlices`.
        variable: Of Keras.
    """
    if not layout_of(variable).used_whole:
        return False
    shape = getattr(gradient, "shape", None) if not hasattr(gradient, "indices") else None
    return shape is None or shape.rank is None or shape.as_list() != variable.shard_shape


def any_in_shards(variables: Iterable[Any]) -> bool:
    """Returns whether replicas have shards of one of some variables."""
    return any(layout_of(each).in_shards for each in variables)


def is_toolkit_strategy(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether a strategy is one of ours, or `enable_fit` was called on it.

    Under any other everything that is wrapped does what Keras and TensorFlow do.
    """
    return getattr(strategy, "made_by_toolkit", False)


def replica_count(strategy: tf.distribute.Strategy | None = None) -> int:
    """Returns how many replicas of a strategy (None: the one in scope) exchange in each step.

    Of a strategy that isn't one of ours it is 1.
    """
    strategy = strategy or tf.distribute.get_strategy()
    kinds = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    # In a step of `fit`, `num_replicas_in_sync` is 1.
    return (
        strategy.extended._num_replicas_in_sync if isinstance(strategy, kinds) and is_toolkit_strategy(strategy) else 1
    )


def mesh_of(strategy: tf.distribute.Strategy | None = None) -> Mesh:
    """Returns the mesh of a strategy (None: the one in scope): by default one group of all replicas."""
    strategy = strategy or tf.distribute.get_strategy()
    count = replica_count(strategy)
    shards = options_of(strategy).shards or count
    return Mesh(shards, count // shards)


def check_shards(strategy: tf.distribute.Strategy, shards: int) -> None:
    """Checks that a strategy's replicas can be divided into groups of this size.

    Raises:
        StrategyError: The replicas can't be divided so, or don't exchange activations.
    """
    count = replica_count(strategy)
    asked = f"sharded layers over groups of {shards!r} replicas"
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise StrategyError(
            asked=asked, found="it must be a whole number of at least 1", remedy="Give such as shards=2"
        )
    if count == 1 and shards > 1:
        raise StrategyError(
            asked=asked,
            found="there is one replica, or each trains by itself",
            remedy="Leave shards out, or train under mirrored or multi_worker on several devices",
        )
    if count % shards:
        fitting = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise StrategyError(
            asked=asked,
            found=f"the {count} replicas can't be divided into such groups",
            remedy=f"Give one of {', '.join(fitting)}, or start another number of replicas",
        )


@contextlib.contextmanager
def in_one_group(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """A context in which all replicas of a strategy are one group."""
    before = options_of(strategy)
    set_options(strategy, dataclasses.replace(before, shards=None))
    try:
        yield
    finally:
        set_options(strategy, before)
