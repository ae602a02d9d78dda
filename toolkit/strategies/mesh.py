"""The mesh of a strategy's replicas: groups train data parallel, and each group holds one copy of a sharded model.

Replica r is shard r mod `shards` of group r div `shards`. TensorFlow numbers a host's replicas one after another, so a
group stays inside a host where a host has room for whole groups: what is chatty uses the fast link.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator

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
