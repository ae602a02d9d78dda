"""A replica on each device of several processes, on one host or many; gradients are summed by all-reduce.

This is `tf.distribute.MultiWorkerMirroredStrategy` with what Keras 3's `fit` lacks under it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from toolkit import cluster as _cluster
from toolkit.errors import StrategyError
from toolkit.strategies import mirrored
from toolkit.strategies.batches import ReadsShares
from toolkit.strategies.fit.adapt import adapt_workers
from toolkit.strategies.processes.agreement import processes, seed_alike
from toolkit.strategies.processes.resolver import (
    ends_in,
    expect_heartbeats,
    keeps_sigterm,
    resolve,
    resolver_here,
    tasks,
    wait_at_exit,
    wait_for_others,
)
from toolkit.strategies.step import collectives, overlap
from toolkit.strategies.step.collectives import options_for
from toolkit.strategies.step.replicas import ReducesForKeras, know_steps
from toolkit.strategies.upstream import table
from toolkit.support import status

_LOG = logging.getLogger(__name__)
# The share of the timeout that is spent waiting for heartbeats; the rest is for the errors of its peers to arrive.
_HEARTBEAT_SHARE = 0.8


class MultiWorkerStrategy(ReadsShares, ReducesForKeras, tf.distribute.MultiWorkerMirroredStrategy):
    """Waits for the others with messages, overrides what fails in Keras 3's `fit`, and declares how data is shared.

    Attributes:
        cluster: All tasks that `create` was given, those that don't train too; None for other ways of making it.

    A process trains with others once: a second strategy of the same cluster gets the first. TensorFlow
    would connect the processes again, each at another time.

    Args:
        cluster_resolver: A resolver of TensorFlow's; None for what the environment describes.
        communication_options: TensorFlow's; None for its defaults.
        communication: "nccl", "ring", or "auto" for NCCL where each replica has its own GPU; an implementation
            in `communication_options` comes first.
        start_timeout: Seconds to wait for the other tasks; None for 300, or what the launcher says.
        every_step: Whether something is exchanged in each step. A process of one core then gets a second thread, by
            which exchanges begin while it computes; where nothing is exchanged that thread costs a tenth of a step.

    Raises:
        ClusterError: TF_CONFIG is wrong, or a task can't be reached.
        StrategyError: TensorFlow was started too early, this process trains with another cluster, or NCCL can't be.
    """

    cluster: _cluster.Cluster | None = None
    _first: "MultiWorkerStrategy | None" = None

    def __new__(cls, *_: Any, **__: Any) -> "MultiWorkerStrategy":
        return MultiWorkerStrategy._first or super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communication: str = "auto",
        start_timeout: float | None = None,
        every_step: bool = True,
    ) -> None:
        if start_timeout is None:
            start_timeout = status.start_timeout()
        resolver = cluster_resolver or resolver_here()
        if self is MultiWorkerStrategy._first:
            _check_same(self, resolver)
            return
        communication_options, why = options_for(communication_options, communication, resolver)
        if resolver is not None:
            wait_for_others(resolver, start_timeout)
            expect_heartbeats(resolver.cluster_spec(), seconds=_HEARTBEAT_SHARE * status.heartbeat_timeout())
        if every_step:
            overlap.let_exchanges_begin()
        with ends_in(start_timeout), keeps_sigterm():
            try:
                super().__init__(resolver, communication_options)
            except RuntimeError as error:
                if "program startup" not in str(error):
                    raise
                raise StrategyError(
                    asked="multi_worker connects this process to the others",
                    found="TensorFlow has already run an operation in it and can't connect any more",
                    remedy="Create the strategy before the first operation, model or seed of the program",
                ) from error
        if resolver is not None and len(tasks(resolver)) > 1:
            MultiWorkerStrategy._first = self
        _ready(self, why)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        """Returns TensorFlow's scope, which refuses variables that can't be sent to the others."""
        with super().scope() as inner, tf.variable_creator_scope(_refuse_bfloat16):
            yield inner

    def gather(self, value: Any, axis: int) -> tf.Tensor:
        """Gathers as TensorFlow does, and also what it can't exchange: `predict` of a model in bfloat16."""
        if self.experimental_local_results(value)[0].dtype != tf.bfloat16:
            return super().gather(value, axis)
        wide = self.run(lambda each: tf.cast(each, tf.float32), args=(value,))
        return tf.cast(super().gather(wide, axis), tf.bfloat16)


def _refuse_bfloat16(make: Callable, **kwargs: Any) -> Any:
    if kwargs.get("dtype") is not None and tf.as_dtype(kwargs["dtype"]) == tf.bfloat16:
        raise StrategyError(
            asked="bfloat16 variables on several workers",
            found="TensorFlow can't broadcast them between processes",
            remedy='Use keras.config.set_dtype_policy("mixed_bfloat16"), which keeps float32 variables',
        )
    return make(**kwargs)


def enable_fit(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Makes Keras 3's `fit`, `evaluate` and `predict` work under a strategy that you created yourself.

        strategy = toolkit.strategies.enable_fit(tf.distribute.MultiWorkerMirroredStrategy())

    Call it right after the strategy is made, on every worker: the workers also agree on random seeds. It takes a
    MirroredStrategy too: without it, `fit` runs, but gives other results than one device for masked losses, for
    batches that can't be shared equally, and for a `train_step` written for one device.

    Returns:
        The same object.

    Raises:
        StrategyError: It is neither of the two.
        RequestError: Keras or TensorFlow is another version than those this works with, and it makes a difference.
    """
    table.check()
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return mirrored.enable(strategy)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise StrategyError(
            asked=f"enable_fit was given a {type(strategy).__name__}",
            found="it takes a MultiWorkerMirroredStrategy or a MirroredStrategy",
            remedy="Don't call it on one device; with parameter servers, use toolkit.strategies.create",
        )
    if not isinstance(strategy, MultiWorkerStrategy):
        strategy.__class__ = MultiWorkerStrategy  # It adds only methods, no state.
        _ready(strategy, "CommunicationOptions don't ask for NCCL" * (collectives.communication_of(strategy) != "nccl"))
    return strategy


def create(
    members: _cluster.Cluster,
    task: _cluster.Task,
    *,
    devices: Sequence[str] = (),
    start_timeout: float | None = None,
    communication: str = "auto",
    every_step: bool = True,
) -> MultiWorkerStrategy:
    """Waits for the other tasks, then joins them.

    Args:
        members: All tasks; those that don't train are left out.
        task: This process's task.
        devices: Logical devices of this process, to be held against those that TensorFlow takes.
        start_timeout: Seconds to wait for the others; None for 300, or what the launcher says.
        communication: As for `MultiWorkerStrategy`.
        every_step: As for `MultiWorkerStrategy`.

    Raises:
        ClusterError: Some task can't be reached in time, or isn't the one expected.
        StrategyError: This task doesn't train, TensorFlow was started too early, or it would use
            other devices.
    """
    if len(devices) > 1 and devices[0].startswith("CPU"):
        raise StrategyError(
            asked=f"{len(devices)} CPU devices are to stand in for GPUs in each worker",
            found="TensorFlow uses one CPU device per worker",
            remedy="Leave gpus out or ask for gpus=1, and start more workers",
        )
    resolver = resolve(members, task)
    strategy = MultiWorkerStrategy(
        resolver, start_timeout=start_timeout, communication=communication, every_step=every_step
    )
    strategy.cluster = members
    return strategy


def _check_same(first: MultiWorkerStrategy, resolver: Any) -> None:
    """Checks that a second strategy belongs to the cluster with which this process trains."""
    theirs = tasks(resolver) if resolver is not None else {}
    if theirs != tasks(first.cluster_resolver):
        raise StrategyError(
            asked="a second multi_worker strategy in this process",
            found=f"this process trains with another cluster: {', '.join(tasks(first.cluster_resolver).values())}",
            remedy="Make only one in each process, or start other processes for the second cluster",
        )


def _ready(strategy: MultiWorkerStrategy, why: str) -> None:
    adapt_workers()
    collectives.number_by_call(strategy)
    know_steps(strategy)
    seed_alike(strategy)
    wait_at_exit(strategy)
    status.report(state="connected", strategy="multi_worker", communication=collectives.communication_of(strategy))
    _LOG.info(
        "%d workers, %d replicas in all; each keeps its share of every global batch (AutoShardPolicy.DATA)",
        processes(strategy),
        strategy.num_replicas_in_sync,
    )
    if tf.config.get_visible_devices("GPU"):
        _LOG.info("Gradients are exchanged by %s", "gRPC, not NCCL: " + why if why else "NCCL, from GPU to GPU")
