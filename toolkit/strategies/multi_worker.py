"""A replica on each device of several processes, on one host or many; gradients are summed by all-reduce.

This is `tf.distribute.MultiWorkerMirroredStrategy` with what Keras 3's `fit` lacks under it.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit import cluster as _cluster
from toolkit.errors import StrategyError
from toolkit.strategies import gradients, hooks, sharing
from toolkit.strategies.agreement import extremes, processes
from toolkit.strategies.consistency import seed_alike
from toolkit.strategies.fitting import adapt_keras
from toolkit.strategies.reducing import ReducesForKeras
from toolkit.strategies.shutdown import wait_at_exit
from toolkit.strategies.uneven_inputs import JoinedDataset
from toolkit.support import status

__all__ = ["MultiWorkerStrategy", "create", "enable_fit"]

_LOG = logging.getLogger(__name__)
# The share of the time in which a lost worker is to be noticed that is waited for heartbeats: its peers' errors have
# their way to go, too.
_HEARTBEAT_SHARE = 0.8
_Policy = tf.data.experimental.AutoShardPolicy


class MultiWorkerStrategy(ReducesForKeras, tf.distribute.MultiWorkerMirroredStrategy):
    """Waits for the others aloud, overrides what Keras 3's `fit` fails on, and states how data is shared.

    Attributes:
        cluster: All tasks that `create` was given, those that don't train too; None for other ways of making it.

    Args:
        cluster_resolver: A resolver of TensorFlow's; None for what the environment describes.
        communication_options: TensorFlow's; None for its defaults.
        start_timeout: Seconds to wait for the other tasks; None for 300, or what the launcher says.

    Raises:
        ClusterError: TF_CONFIG is wrong, or a task can't be reached.
        StrategyError: TensorFlow was started too early.
    """

    cluster: _cluster.Cluster | None = None

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None, *, start_timeout: float | None = None
    ) -> None:
        if start_timeout is None:
            start_timeout = status.start_timeout()
        resolver = cluster_resolver or _resolver()
        if resolver is not None:
            _wait_for_others(resolver, start_timeout)
            hooks.expect_heartbeats(resolver.cluster_spec(), seconds=_HEARTBEAT_SHARE * status.heartbeat_timeout())
        with _ends_in(start_timeout), _keeps_sigterm():
            try:
                super().__init__(resolver, communication_options)
            except RuntimeError as error:
                if "program startup" not in str(error):
                    raise
                raise StrategyError(
                    asked="multi_worker connects this process with the others",
                    found="TensorFlow has run something before, and can't connect any more",
                    remedy="Create the strategy before the first operation, model or seed of the program",
                ) from error
        _ready(self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives each replica its share of every global batch, unless the dataset's own options say otherwise.

        Every worker reads the whole dataset and keeps its share, so that no example counts twice
        and no replica goes without. Under AutoShardPolicy.OFF each worker's batches are its own, and
        together they are the global batch; under FILE TensorFlow deals the files out. Both may leave
        one worker with less: an epoch of `fit` then ends for all with the first that runs out. A
        training loop of your own gets TensorFlow's own dataset there.
        """
        if not isinstance(dataset, tf.data.Dataset) or not sharing.is_batched(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        policy = dataset.options().experimental_distribute.auto_shard_policy
        local = len(self.extended.worker_devices)
        # What ends together is for Keras's loop, in Python: a loop of the user's may be a tf.function.
        caller = sys._getframe(1)
        keras = caller.f_globals.get("__name__", "").startswith("keras.") and processes(self) > 1
        if policy not in (_Policy.AUTO, _Policy.DATA):
            if not keras or policy != _Policy.OFF:
                theirs = super().experimental_distribute_dataset(dataset, options)
                return JoinedDataset(self, theirs) if keras else theirs
            own = sharing.shares(dataset, indices=range(local), count=local)
            return JoinedDataset(self, self.distribute_datasets_from_function(lambda _: own, options))
        shared = self.distribute_datasets_from_function(
            lambda context: sharing.shares(
                dataset, indices=sharing.shares_of_worker(context), count=self.num_replicas_in_sync
            ),
            options,
        )
        if not keras:
            return shared
        # Keras knows the length of arrays too, whose datasets don't say it.
        adapter = getattr(caller.f_locals.get("self"), "data_adapter", None)
        batches = getattr(adapter, "num_batches", None)
        self._check_lengths(-1 if batches is None else int(batches))
        unknown = batches is None and dataset.cardinality() != tf.data.INFINITE_CARDINALITY
        return JoinedDataset(self, shared) if unknown else shared

    def _check_lengths(self, batches: int) -> None:
        """Makes sure that the workers read the same data, as far as its length shows; else they would wait for ever."""
        lowest, highest = (int(value[0]) for value in extremes(self, np.array([batches], np.int64)))
        if lowest != highest:
            raise StrategyError(
                asked="every worker is to read the whole data set, and keep its share of each batch",
                found=f"the workers' data have different lengths, such as {lowest} and {highest} batches",
                remedy="Give all workers the same data, or set AutoShardPolicy.OFF where each has data of its own",
            )


def enable_fit(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> MultiWorkerStrategy:
    """Makes Keras 3's `fit`, `evaluate` and `predict` work under a strategy that you have made yourself.

        strategy = toolkit.strategies.enable_fit(tf.distribute.MultiWorkerMirroredStrategy())

    Call it on every worker right after the strategy is made: the workers also agree on random seeds.

    Returns:
        The same object.

    Raises:
        StrategyError: It is no MultiWorkerMirroredStrategy.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise StrategyError(
            asked=f"enable_fit was given a {type(strategy).__name__}",
            found="it mends MultiWorkerMirroredStrategy only",
            remedy="Leave it out: fit needs no help under MirroredStrategy or on one device",
        )
    if not isinstance(strategy, MultiWorkerStrategy):
        strategy.__class__ = MultiWorkerStrategy  # It adds methods only, no state.
        _ready(strategy)
    return strategy


def create(
    members: _cluster.Cluster, task: _cluster.Task, *, devices: Sequence[str] = (), start_timeout: float | None = None
) -> MultiWorkerStrategy:
    """Waits for the other tasks, then joins them.

    Args:
        members: All tasks; those that don't train are left out.
        task: This process's task.
        devices: Logical devices of this process, to be held against those that TensorFlow takes.
        start_timeout: Seconds to wait for the others; None for 300, or what the launcher says.

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
    strategy = MultiWorkerStrategy(_resolve(members, task), start_timeout=start_timeout)
    strategy.cluster = members
    return strategy


def _resolver() -> Any:
    """Returns the resolver of the environment's cluster; None where this process is alone, as TensorFlow has it."""
    found = _cluster.discover(os.environ)
    return None if found is None or found.task.job == "evaluator" else _resolve(found.cluster, found.task)


def _resolve(members: _cluster.Cluster, task: _cluster.Task) -> Any:
    if any(other.job == "ps" for other in members.tasks):
        raise StrategyError(
            asked="multi_worker trains by all-reduce between chief and workers",
            found="the cluster has parameter servers, for which it has no use",
            remedy="Leave the ps tasks out of the cluster",
        )
    if task not in members.synchronous:
        raise StrategyError(
            asked=f"multi_worker trains on chief and workers, and this process is {task}",
            found="it is none of them",
            remedy="Start this task as chief or worker, or leave it out",
        )
    together = members.restricted_to(members.synchronous)
    workers = [other.index for other in together.tasks if other.job == "worker"]
    if workers and workers != list(range(len(workers))):
        raise StrategyError(
            asked="multi_worker counts the workers from 0 on",
            found=f"the cluster has worker {', '.join(map(str, workers))} only",
            remedy="List all workers, or number them without gaps",
        )
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(together.as_dict()), task_type=task.job, task_id=task.index, rpc_layer="grpc"
    )


def _wait_for_others(resolver: Any, timeout: float) -> None:
    jobs = resolver.cluster_spec().as_dict()
    if jobs and resolver.task_type:
        members = _cluster.Cluster(jobs)
        task = _cluster.Task(resolver.task_type, resolver.task_id)
        _cluster.check_proxies(members, os.environ)
        # Neither arguments nor the script's text are compared, nor digits in its name: scripts of old tutorials have
        # the worker's index in any of them.
        program = _cluster.describe_program(
            getattr(sys.modules.get("__main__"), "__file__", None), None, job=status.attempt_id()
        )
        _cluster.wait_for_tasks(members.restricted_to(members.synchronous), task, timeout=timeout, program=program)


def _ready(strategy: MultiWorkerStrategy) -> None:
    adapt_keras()
    hooks.install()
    gradients.adapt_optimizers()
    seed_alike(strategy)
    wait_at_exit(strategy)
    status.report(state="connected", strategy="multi_worker")
    _LOG.info(
        "%d workers, %d replicas in all; each keeps its share of every global batch (AutoShardPolicy.DATA)",
        processes(strategy),
        strategy.num_replicas_in_sync,
    )


@contextlib.contextmanager
def _ends_in(seconds: float) -> Iterator[None]:
    """Ends the process where connecting takes too long.

    While TensorFlow waits for a peer it holds Python's interpreter lock and ignores SIGTERM: no
    exception, thread or timer of Python's gets a turn. faulthandler's thread needs no lock.
    """
    faulthandler.dump_traceback_later(max(seconds, 60), exit=True)  # All have met: it should be a second.
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _keeps_sigterm() -> Iterator[None]:
    """Puts SIGTERM's handler back: TensorFlow's own notes the signal and does nothing."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)
