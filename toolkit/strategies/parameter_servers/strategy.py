"""Variables on parameter servers, and steps that a chief dispatches to workers, each at its own pace.

This is `tf.distribute.ParameterServerStrategy` with what Keras 3's `fit` lacks under it, which is in the files beside
this one. `create` waits for all tasks. In the chief it then returns the strategy; a worker or ps serves until the chief
is done.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from toolkit.cluster import Cluster, Task, describe_program, reach_directly, wait_for_tasks
from toolkit.errors import StrategyError
from toolkit.strategies.check.first_step import check_first
from toolkit.strategies.fit.adapt import adapt_draws, adapt_keras
from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers import internals, sources, worker_step
from toolkit.strategies.parameter_servers.checking import made_and_compared
from toolkit.strategies.parameter_servers.dispatch import Dispatcher, answers
from toolkit.strategies.parameter_servers.ledger import Ledger
from toolkit.strategies.parameter_servers.placement import Placement, ServerShardedVariable, bytes_by_task, table
from toolkit.strategies.parameter_servers.session import Session
from toolkit.strategies.parameter_servers.variables import take, watched
from toolkit.strategies.parameter_servers.worker_step import adapt_updates
from toolkit.strategies.pipelines import epoch_iterator, whole_for_keras
from toolkit.strategies.step.share import reduced_values
from toolkit.strategies.step.tape import gradient
from toolkit.strategies.step.train_step import call_function
from toolkit.strategies.step.whole_batch import watch
from toolkit.strategies.upstream import replaced, train_function
from toolkit.strategies.variables import optimizers_of
from toolkit.support import redaction, signals, status

_LOG = logging.getLogger(__name__)


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """The chief's strategy, under whose scope a Keras model is built, compiled and fitted as usual.

    Args:
        cluster: All tasks.
        options: Where variables live, and how asynchronous training is.

    Raises:
        StrategyError: The workers have more than one GPU each.
    """

    made_by_toolkit = True
    numbered = staticmethod(sources.numbered)

    def __init__(self, cluster: Cluster, options: ParameterServerOptions) -> None:
        members = cluster.restricted_to([task for task in cluster.tasks if task.job != "evaluator"])
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(members.as_dict()), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        super().__init__(resolver)
        if self.num_replicas_in_sync > 1:
            raise StrategyError(
                asked="each worker trains a replica of the model",
                found=f"TensorFlow counts {self.num_replicas_in_sync} GPUs in each",
                remedy="Start one worker per GPU, and give each of them one with CUDA_VISIBLE_DEVICES",
            )
        self.cluster = cluster
        self.options = options
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        internals.used_with_coordinator(self)
        adapt_updates(self)
        servers = [task for task in members.tasks if task.job == "ps"]
        self._placement = Placement(len(servers), options)
        devices = [f"/job:ps/replica:0/task:{task.index}/device:CPU:0" for task in servers]
        self._ledgers = {device: Ledger(device) for device in devices}
        self.dispatcher = Dispatcher(self.coordinator, members)
        adapt_keras()
        adapt_draws()
        replaced.APPLY.answer(servers=worker_step.apply, chief=worker_step.apply_in_chief)
        replaced.FUNCTION.answer(step=call_function)
        replaced.TAKE.answer(servers=take)
        replaced.WATCHED.answer(servers=watched)
        if options.synchronous:
            replaced.REDUCE.answer(replicas=reduced_values)
            replaced.GRADIENT.answer(replicas=gradient)
        status.report(state="connected", strategy="parameter_server")
        _LOG.info("%d workers, %d ps; %s", self.dispatcher.workers, len(servers), options)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        """Returns TensorFlow's scope, which also places each new variable."""
        with super().scope() as inner, tf.variable_creator_scope(self._placement.create):
            yield inner

    @whole_for_keras
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives Keras a stream of batches, each of which goes to a free worker; other datasets are TensorFlow's."""
        if epoch_iterator() is None or not isinstance(dataset, tf.data.Dataset):
            return super().experimental_distribute_dataset(dataset, options)
        stream = sources.Stream(dataset)
        if not stream.is_dense:
            raise StrategyError(
                asked="fit dispatches batches to the workers",
                found=f"they hold values that aren't dense tensors: {dataset.element_spec}",
                remedy="Make them dense, as with .map(lambda x: x.to_tensor())",
            )
        return stream

    def distribute_datasets_from_function(self, dataset_fn: Callable, options: Any = None) -> Any:  # noqa: ARG002
        """Each worker creates its own dataset with the same function, and reads it endlessly.

        Args:
            dataset_fn: Takes a `tf.distribute.InputContext`; returns a `tf.data.Dataset`.
            options: None.
        """
        count = self.dispatcher.workers

        def make(worker: int) -> tf.data.Dataset:
            return dataset_fn(tf.distribute.InputContext(count, worker, self.num_replicas_in_sync))

        return sources.per_worker(make(0), make)

    def session(self, model: Any) -> Session:
        """Returns the model's session. `compile` begins a new one, and so does a new variable.

        Keras makes metrics' own when it first sees data.
        """
        of = (id(getattr(model, "optimizer", None)), len(model.variables), len(model.metrics_variables))
        found = model.__dict__.get("_toolkit_session")
        if found is None or found[0] != of:
            found = (of, Session(model, self.dispatcher, self._ledgers, self.options))
            object.__setattr__(model, "_toolkit_session", found)
        return found[1]

    def wait_for_steps(self, model: Any) -> None:
        """Waits for all steps of a model, if any were sent."""
        found = model.__dict__.get("_toolkit_session")
        if found is not None:
            found[1].wait_for_steps()

    def replace_functions(self, model: Any) -> None:
        """Replaces Keras's own step functions by this strategy's."""
        if not train_function.is_made(model, "train"):  # After another `compile`, other variables may be trainable.
            self.wait_for_steps(model)
            model.__dict__.pop("_toolkit_session", None)
        watch(model)
        session = self.session(model)
        steps = {"train": session.train, "test": session.test, "predict": session.predict}
        new = [each for each in steps if not train_function.is_made(model, each)]
        train_function.replace(model, **steps)
        for each in new:
            check_first(each, model, train_function.wrapped(model, each), made_and_compared)
        kind = type(model)
        object.__setattr__(model, "get_metrics_result", lambda: session.results(lambda: kind.get_metrics_result(model)))
        object.__setattr__(model, "reset_metrics", lambda: session.reset(lambda: kind.reset_metrics(model)))

    def begin(self, model: Any) -> None:
        """Begins a training.

        Raises:
            StrategyError: The model can't be trained by workers.
        """
        in_turn = self.options.synchronous or self.options.max_staleness == 0 or self.dispatcher.workers == 1
        for optimizer in optimizers_of(model):
            steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
            if steps and not in_turn:
                raise StrategyError(
                    asked=f"gradient_accumulation_steps={steps} under parameter servers",
                    found="workers train at the same time, and one would use a sum to which others still add",
                    remedy="Use batches that many times larger, or max_staleness=0, which does one step at a time",
                )
        if self.options.variables == "sharded" and not any(
            isinstance(v.value, ServerShardedVariable) for v in model.variables
        ):
            _LOG.warning(
                "No variable is sharded: none is large enough for two shards of %d KiB",
                self.options.min_shard_bytes >> 10,
            )
        if model.run_eagerly:
            raise StrategyError(
                asked="compile(run_eagerly=True)",
                found="under parameter servers steps run as functions on the workers",
                remedy="Leave run_eagerly out",
            )
        self.session(model).wait_for_steps()

    def report(self, model: Any) -> dict[str, Any]:
        """Returns what `strategies.report` returns."""
        session = self.session(model)
        rows = table(model.variables)
        beside = table([v for optimizer in optimizers_of(model) for v in optimizer.variables])
        return {
            "variables": rows,
            "bytes_by_task": bytes_by_task([*rows, *beside]),
            "staleness": {str(updates): count for updates, count in sorted(session.staleness.items())},
            "updates": session.applied,
            "steps_by_worker": {f"worker:{index}": count for index, count in sorted(self.dispatcher.by_worker.items())},
            "dispatches_run_again": self.dispatcher.retried,
            "updates_found_applied": session.recovered,
            "updates_interrupted": session.interrupted,
        }


def create(
    cluster: Cluster, task: Task, *, options: ParameterServerOptions | None = None, start_timeout: float | None = None
) -> ParameterServerStrategy:
    """In the chief, returns the strategy after the rendezvous. In a worker or ps, serves and ends the process.

    Args:
        cluster: All tasks.
        task: This process's task.
        options: How parameter servers are used; None for TensorFlow's ways.
        start_timeout: Seconds to wait for the others; None for 300, or what the launcher says.

    Raises:
        StrategyError: The cluster has no ps, or this task has no part in it.
        ClusterError: Some task can't be reached in time, or isn't the one expected.
    """
    jobs = {other.job for other in cluster.tasks}
    for job in ("ps", "chief", "worker"):
        if job not in jobs:
            raise StrategyError(
                asked="parameter_server trains with a chief, workers and parameter servers",
                found=f"the cluster has no {job}: {cluster.listed()}",
                remedy=f"Start with toolkit launch --chief --workers=2 --ps=2, or add {job!r} to the cluster",
            )
    if task not in cluster or task.job == "evaluator":
        raise StrategyError(
            asked=f"{task} creates the strategy parameter_server",
            found="this task doesn't train",
            remedy="To evaluate checkpoints, do what recipes.cifar_parameter_server does in an evaluator",
        )
    if start_timeout is None:
        start_timeout = status.start_timeout()
    reach_directly(cluster)
    others = [other for other in cluster.tasks if other.job in ("worker", "ps")]
    # What tasks tell one another isn't encrypted, and a message shows where they differ.
    arguments = redaction.masked_command(sys.argv[1:], os.environ)
    program = describe_program(
        getattr(sys.modules.get("__main__"), "__file__", None), arguments, job=status.attempt_id()
    )
    if task.job != "chief":
        wait_for_tasks(cluster, task, timeout=start_timeout, peers=[cluster.chief], program=program)
        _serve(cluster, task)
    wait_for_tasks(cluster, task, timeout=start_timeout, peers=others, program=program)
    _wait_for_servers(cluster, others)
    return ParameterServerStrategy(cluster, options or ParameterServerOptions())


_LOOK = 1.0  # Seconds between two checks of the chief.
_PATIENCE = 5.0  # Seconds that the chief may be out of reach.


def _wait_for_servers(cluster: Cluster, others: list) -> None:
    """Waits for TensorFlow's start in tasks that have reached the rendezvous."""
    until = time.monotonic() + 120
    while missing := [task for task in others if not answers(cluster, task)]:
        if time.monotonic() > until:
            raise StrategyError(
                asked="the chief waits for the TensorFlow servers of the workers and ps",
                found=f"after 120 s there is no answer from {', '.join(map(str, missing[:4]))}",
                remedy="See the end of their output",
            )
        time.sleep(0.05)


def _serve(cluster: Cluster, task: Task) -> NoReturn:
    """Serves, then ends the process: with 0 when the chief has ended, with 143 or 130 on a signal.

    TensorFlow's own `join` never returns, and lets no signal handler of Python's run.

    Args:
        cluster: All tasks.
        task: Who this process is: a worker or ps.
    """
    stop = threading.Event()
    received: list[int] = []

    def end(number: int, _: Any) -> None:
        received.append(number)
        stop.set()

    with signals.handle((signal.SIGINT, signal.SIGTERM), end):
        members = [other for other in cluster.tasks if other.job != "evaluator"]
        spec = tf.train.ClusterSpec(cluster.restricted_to(members).as_dict())
        server = tf.distribute.Server(
            spec, job_name=task.job, task_index=task.index, protocol="grpc", config=_config(task)
        )
        status.report(state="serving", strategy="parameter_server")
        _LOG.info("%s serves at %s until the chief ends", task, cluster.address(task))
        seen = time.monotonic()
        while not stop.wait(_LOOK):
            now = time.monotonic()
            if answers(cluster, cluster.chief):
                seen = now
            elif now - seen > _PATIENCE:
                _LOG.info("The chief has ended, and so does %s", task)
                break
        status.report(state="ending")
        del server
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + received[0] if received else 0)  # TensorFlow's server never ends by itself.


def _config(task: Task) -> Any:
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    if task.job == "ps":
        config.device_count["GPU"] = 0
    return config
