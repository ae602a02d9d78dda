"""TensorFlow's resolver of the tasks that train together, the wait for the others, and when one counts as lost.

Processes that train together end together, too. A worker that exits while another still works is reported there as
crashed, although all is done (tensorflow#58434; seen in 2 of 28 runs). So each waits at its exit until all have come to
theirs: the shutdown barrier.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from toolkit import cluster as _cluster
from toolkit.errors import StrategyError
from toolkit.strategies.processes import agreement
from toolkit.strategies.upstream import private
from toolkit.support import status

_LOG = logging.getLogger(__name__)


def resolver_here() -> Any:
    """Returns the resolver of the environment's cluster; None if this process is alone, as in TensorFlow."""
    found = _cluster.discover(os.environ)
    return None if found is None or found.task.job == "evaluator" else resolve(found.cluster, found.task)


def resolve(members: _cluster.Cluster, task: _cluster.Task) -> Any:
    """Returns TensorFlow's resolver for those tasks of a cluster that train together.

    Raises:
        StrategyError: They don't, or this task isn't one of them.
    """
    if any(other.job == "ps" for other in members.tasks):
        raise StrategyError(
            asked="multi_worker trains by all-reduce between chief and workers",
            found="the cluster has parameter servers, which multi_worker can't use",
            remedy="Leave the ps tasks out of the cluster",
        )
    if task not in members.synchronous:
        raise StrategyError(
            asked=f"{task} uses the strategy multi_worker",
            found="only the chief and the workers of the cluster train",
            remedy="Start this task as chief or worker, or don't start it",
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


def tasks(resolver: Any) -> dict[str, str]:
    """Returns the addresses of a resolver's tasks, by their names."""
    jobs = resolver.cluster_spec().as_dict()
    return {f"{job}:{index}": address for job, listed in jobs.items() for index, address in enumerate(listed)}


def wait_for_others(resolver: Any, timeout: float) -> None:
    """Waits until all that train together can be reached, and checks that they run the same program."""
    jobs = resolver.cluster_spec().as_dict()
    if jobs and resolver.task_type:
        members = _cluster.Cluster(jobs)
        task = _cluster.Task(resolver.task_type, resolver.task_id)
        _cluster.reach_directly(members)
        # Arguments, the script's text and digits in its name aren't compared: scripts of old tutorials have the
        # worker's index in them.
        program = _cluster.describe_program(
            getattr(sys.modules.get("__main__"), "__file__", None), None, job=status.attempt_id()
        )
        _cluster.wait_for_tasks(members.restricted_to(members.synchronous), task, timeout=timeout, program=program)


def expect_heartbeats(cluster_spec: tf.train.ClusterSpec, *, seconds: float) -> None:
    """Sets after how many seconds without a heartbeat a worker counts as lost, before a strategy is created.

    MultiWorkerMirroredStrategy configures TensorFlow's coordination service itself, with ten seconds, unless that has
    been done; there is no public way to say another number. A heartbeat that isn't answered within half the time ends
    a worker: a gap of 10 s needs more than 20 s.
    """
    jobs = [
        private.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=cluster_spec.num_tasks(job))
        for job in ("chief", "worker")
        if job in cluster_spec.jobs
    ]
    if private.context.context().coordination_service is None:
        private.context.context().configure_coordination_service(
            service_type="standalone",
            service_leader=f"/job:{jobs[0].name}/replica:0/task:0",
            heartbeat_timeout_in_ms=max(1, round(1000 * seconds)),
            coordinated_jobs=jobs,
        )


@contextlib.contextmanager
def ends_in(seconds: float) -> Iterator[None]:
    """Ends the process if connecting takes too long.

    While TensorFlow waits for a peer it holds Python's interpreter lock and ignores SIGTERM: no
    exception, thread or timer of Python's gets a turn. faulthandler's thread needs no lock.
    """
    # All have passed the rendezvous, so it should take a second.
    faulthandler.dump_traceback_later(max(seconds, 60), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def keeps_sigterm() -> Iterator[None]:
    """Restores SIGTERM's handler: TensorFlow's own only records the signal."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


# The others may be saving or evaluating, or they may be in a step that needs this process.
_END_SECONDS = 60.0


def wait_at_exit(strategy: tf.distribute.Strategy) -> None:
    """Makes this process wait for the others when it exits, unless it fails."""
    if agreement.processes(strategy) > 1:
        atexit.register(_wait_for_end, strategy, os.getpid())


def _wait_for_end(strategy: tf.distribute.Strategy, pid: int) -> None:
    if os.getpid() != pid:  # A fork of the worker also runs functions registered for its exit, but takes no part.
        return
    if status.failed() or hasattr(sys, "last_value"):  # Python sets it when it has printed a traceback.
        return
    status.report(state="ending")
    try:
        agreement.barrier(strategy, seconds=_END_SECONDS)
    except tf.errors.OpError as error:
        _LOG.warning("Another worker ended before all workers had finished (%s)", type(error).__name__)
