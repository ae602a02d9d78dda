"""What only TensorFlow's insides allow, in one place: two private functions of 2.21, wrapped, and what is used there.

`tests/strategies/test_hooks.py` fails when either changes, and says which one is no longer needed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import cross_device_utils, multi_worker_util
from tensorflow.python.distribute.collective_all_reduce_strategy import coordination_config_pb2
from tensorflow.python.eager import context

from toolkit.strategies.communication import kind_of
from toolkit.strategies.sharing import untuned
from toolkit.support.wrapping import wrap

__all__ = [
    "communication_of",
    "expect_heartbeats",
    "input_devices_kept",
    "install",
    "ordering_token",
    "runs_after",
]


def install() -> None:
    """Wraps both, for the whole process; calling it again changes nothing."""
    wrap(multi_device_iterator_ops, "_create_device_dataset", _untuned)
    wrap(cross_device_utils.CollectiveReplicaLauncher, "_use_unique_instance_key", _unique_outside_loops)


def expect_heartbeats(cluster_spec: tf.train.ClusterSpec, *, seconds: float) -> None:
    """Says after how many seconds without a heartbeat a worker counts as gone, before a strategy is made.

    MultiWorkerMirroredStrategy configures TensorFlow's coordination service itself, with ten seconds, unless that has
    been done; there is no public way to say another number. A heartbeat that isn't answered within half the time ends
    a worker: a gap of 10 s needs more than 20 s.
    """
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=cluster_spec.num_tasks(job))
        for job in ("chief", "worker")
        if job in cluster_spec.jobs
    ]
    if context.context().coordination_service is None:
        context.context().configure_coordination_service(
            service_type="standalone",
            service_leader=multi_worker_util.coordination_leader(cluster_spec),
            heartbeat_timeout_in_ms=max(1, round(1000 * seconds)),
            coordinated_jobs=jobs,
        )


def communication_of(strategy: tf.distribute.Strategy) -> str:
    """Returns what the processes of a strategy exchange tensors by: "nccl" or "ring"."""
    return kind_of(strategy.extended._communication_options)


def ordering_token(strategy: tf.distribute.Strategy, replica: int) -> tf.Tensor:
    """Returns the resource by which TensorFlow orders its calls of NCCL on one of this process's replicas.

    Other calls on the same device must be ordered by the same one.
    """
    return strategy.extended._cross_device_ops._launchers[replica]._get_ordering_token()


@contextlib.contextmanager
def input_devices_kept(strategy: tf.distribute.MirroredStrategy) -> Iterator[None]:
    """Puts back what a data set with InputReplicationMode.PER_REPLICA changes for all that are distributed after it.

    TensorFlow 2.21 keeps the mode on the strategy, and would ask for each replica's share in every replica's pipeline.
    """
    before = strategy.extended._input_workers_devices
    try:
        yield
    finally:
        strategy.extended._input_workers_devices = before


def runs_after(later: tf.Operation, earlier: tf.Operation) -> None:
    """Has one operation of a graph that is being traced wait for another, which was perhaps made after it.

    `tf.control_dependencies` is public, but for operations that are still to be made.
    """
    later._add_control_input(earlier)


def _untuned(original: Callable, *args: Any, **kwargs: Any) -> tf.data.Dataset:
    """Switches tf.data's autotuning off between pipeline and device.

    A distributed dataset's own options don't reach the small datasets that TensorFlow puts there: runs of several
    workers on one machine ended 7 s late 2 times of 6 with that tuning, and 0 times of 6 without. There is nothing to
    tune in these datasets, and no public way to say so.
    """
    return untuned(original(*args, **kwargs))


def _unique_outside_loops(original: Callable, launcher: Any) -> bool:
    """Numbers the collectives of a function that is called in a branch of a loop when it is traced.

    Else TensorFlow numbers them when it is called, through a placeholder that nothing feeds there:
    `compile(steps_per_execution=2)` then fails on several replicas with "You must feed a value for
    placeholder". All workers trace the same functions in the same order.
    """
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not getattr(outer, "is_control_flow_graph", False) and original(launcher)
