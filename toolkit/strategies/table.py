"""The names of the strategies, what "auto" means, and what a strategy is, for a summary."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster import Membership, discover
from toolkit.errors import StrategyError
from toolkit.strategies import mirrored, one_device
from toolkit.strategies.parameter_servers import ParameterServerOptions

if TYPE_CHECKING:
    import tensorflow as tf

    from toolkit.strategies.exchange import GradientExchange

__all__ = ["NAMES", "create", "describe"]

NAMES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server")


def create(
    name: str = "auto",
    *,
    devices: Sequence[str] = (),
    membership: Membership | None = None,
    start_timeout: float | None = None,
    parameter_server: ParameterServerOptions | None = None,
    gradients: "GradientExchange | None" = None,
    communication: str = "auto",
    shards: int | None = None,
    optimizer_state: str = "replicated",
) -> "tf.distribute.Strategy":
    """Makes a strategy. Build and compile the model under its `scope()`; `fit` stays Keras's own.

    Under parameter servers this returns in the chief only: a worker or ps serves here, and its
    process ends when the chief has.

    Args:
        name: "one_device", "mirrored", "multi_worker", "parameter_server", or "auto":
            parameter_server where the cluster has any, multi_worker where the process is one of
            several that train together, otherwise mirrored where there are several logical devices,
            otherwise one_device. An evaluator takes part in no training and gets one of the last two.
        devices: Logical devices, as `Setup.logical_devices` gives them; () for all GPUs TensorFlow
            shows, or else all its CPU devices.
        membership: Who takes part and who this process is; None for what the environment says, as
            `toolkit.cluster.discover` reads it.
        start_timeout: Seconds to wait for the other tasks; None for 300, or what the launcher says.
        parameter_server: How parameter servers are used, where they are.
        gradients: How replicas exchange them, under mirrored and multi_worker; None for the
            defaults of `GradientExchange`.
        communication: What processes exchange tensors by, under multi_worker: "nccl", "ring", or "auto" for NCCL where
            each replica has a GPU of its own, the ring elsewhere.
        shards: How many replicas together hold one copy of the sharded layers, under mirrored and multi_worker; such
            groups of replicas train data parallel. None for all replicas in one group; with 1, every replica holds
            whole layers.
        optimizer_state: "replicated", or "sharded", under mirrored and multi_worker: each replica then keeps only its
            part of the optimizer's slots for layers that every replica has (ZeRO stage 1, arXiv 1910.02054).

    Returns:
        An ordinary `tf.distribute.Strategy`.

    Raises:
        StrategyError: The name is unknown, Keras runs on another backend, or the strategy doesn't
            fit the cluster.
        ClusterError: TF_CONFIG is wrong, or another task can't be met.
        RequestError: Keras or TensorFlow is another version than those this works with, and it makes a difference.
    """
    if name not in NAMES:
        raise StrategyError(
            asked=f"strategy {name!r}",
            found="there is no strategy of that name",
            remedy="Choose one of " + ", ".join(NAMES),
        )
    _check_backend()
    from toolkit.support import recompute, taken_over

    taken_over.check()
    recompute.install()
    # TensorFlow reads TF_CONFIG whatever strategy is made, so a broken one is said in any case.
    membership = membership or discover(os.environ)
    jobs = {task.job for task in membership.cluster.tasks} if membership else set()
    outside = membership is not None and membership.task.job == "evaluator"
    if name == "parameter_server" or (name == "auto" and "ps" in jobs and not outside):
        if gradients is not None and gradients.dtype != "float32":
            raise StrategyError(
                asked=f"gradients with communication dtype {gradients.dtype}",
                found="parameter servers exchange gradients in their own dtype",
                remedy="Leave gradients out, or train under mirrored or multi_worker",
            )
        if shards is not None:
            raise StrategyError(
                asked=f"shards={shards!r} with parameter servers",
                found="workers of parameter servers exchange no activations",
                remedy="Leave shards out (ParameterServerOptions(variables='sharded') shards variables over the ps), "
                "or train under mirrored or multi_worker",
            )
        if optimizer_state != "replicated":
            raise StrategyError(
                asked=f"optimizer_state={optimizer_state!r} with parameter servers",
                found="there the ps tasks hold an optimizer's state beside its variables",
                remedy="Leave it out, or give ParameterServerOptions(variables='sharded')",
            )
        from toolkit.strategies import parameter_server as served

        who = _required(name, membership, tasks="--chief --workers=2 --ps=2")
        return served.create(who.cluster, who.task, options=parameter_server, start_timeout=start_timeout)
    if membership is not None and "ps" in jobs and membership.task.job in ("worker", "ps"):
        raise StrategyError(
            asked=f"strategy {name} in {membership.task}",
            found="beside parameter servers, workers and ps serve the chief and train nothing themselves",
            remedy="Create parameter_server or auto, or start the chief only",
        )
    together = membership is not None and len(membership.cluster.tasks) > 1 and not outside
    strategy: tf.distribute.Strategy
    if name == "multi_worker" or (name == "auto" and together):
        who = _required(name, membership, tasks="--workers=2")
        from toolkit.strategies import multi_worker

        strategy = multi_worker.create(
            who.cluster, who.task, devices=tuple(devices), start_timeout=start_timeout, communication=communication
        )
    elif communication != "auto":
        raise StrategyError(
            asked=f"communication={communication!r}",
            found="this process trains alone; communication is for several processes",
            remedy="Leave it out",
        )
    else:
        devices = tuple(devices) or _all_devices()
        several = name == "mirrored" or (name == "auto" and len(devices) > 1)
        strategy = (mirrored if several else one_device).create(devices)
    if gradients is not None:
        from toolkit.strategies.exchange import set_exchange

        set_exchange(strategy, gradients)
    if optimizer_state != "replicated":
        from toolkit.strategies.gradients import adapt_optimizers
        from toolkit.strategies.state_shards import set_optimizer_state

        adapt_optimizers()
        set_optimizer_state(strategy, optimizer_state)
    if shards is not None:
        from toolkit.strategies.mesh import set_shards

        set_shards(strategy, shards)
    return strategy


def describe(strategy: "tf.distribute.Strategy") -> dict[str, Any]:
    """Returns what a strategy is, as values that JSON can hold, for the summary of a run.

    Args:
        strategy: Any, made by `create` or not.

    Returns:
        These, by name:

        - strategy: The name by which `create` makes such a one; for others the name of the class.
        - replicas: How many copies of the model train; under parameter servers the number of workers.
        - devices: Logical devices of this process, such as "CPU:0", in the order in which its replicas use them.
        - cluster: All tasks' addresses by job, as in TF_CONFIG; only where several processes may take part.
        - mesh: {"shards": ..., "groups": ...}, under mirrored and multi_worker made here: how many replicas hold one
          copy of a model with sharded layers, and how many times.
        - optimizer_state: "replicated" or "sharded", under mirrored and multi_worker made here.
        - communication: "nccl" or "ring", by which processes exchange tensors; under multi_worker only.
    """
    import tensorflow as tf

    # What `create` was given has the evaluators too; TensorFlow's own ParameterServerStrategy doesn't give a resolver.
    resolver = strategy.cluster_resolver
    cluster = getattr(strategy, "cluster", None) or (resolver and resolver.cluster_spec())
    described: dict[str, Any] = {"strategy": type(strategy).__name__, "replicas": strategy.num_replicas_in_sync}
    if cluster and isinstance(strategy, tf.distribute.ParameterServerStrategy):
        workers = len(cluster.as_dict()["worker"])
        described |= {"strategy": "parameter_server", "replicas": workers, "devices": list(_all_devices())}
    elif type(strategy).__name__ == "_DefaultDistributionStrategy":  # It doesn't say which device it uses.
        described |= {"strategy": "one_device", "devices": [one_device.first_device()]}
    else:
        if isinstance(strategy, tf.distribute.MirroredStrategy):
            described["strategy"] = "mirrored"
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            from toolkit.strategies.hooks import communication_of

            described |= {"strategy": "multi_worker", "communication": communication_of(strategy)}
        from toolkit.strategies.mesh import made_here, mesh_of
        from toolkit.strategies.state_shards import optimizer_state_of

        if made_here(strategy):
            described["mesh"] = dataclasses.asdict(mesh_of(strategy))
            described["optimizer_state"] = optimizer_state_of(strategy)
        devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
        described["devices"] = [f"{device.device_type}:{device.device_index}" for device in devices]
    return {**described, "cluster": cluster.as_dict()} if cluster else described


def _required(name: str, membership: Membership | None, *, tasks: str) -> Membership:
    if membership is None:
        raise StrategyError(
            asked=f"strategy {name} trains in several processes",
            found="nothing says who takes part: TF_CONFIG is not set",
            remedy=f"Start with toolkit launch {tasks}, set TF_CONFIG, or name a file of tf_configs/",
        )
    return membership


def _all_devices() -> tuple[str, ...]:
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        # Once a chief is connected, TensorFlow lists the devices of its workers and ps among its own.
        jobs = (tf.DeviceSpec.from_string(device.name).job for device in tf.config.list_logical_devices(kind))
        found = [job for job in jobs if job not in ("worker", "ps")]
        if found:
            return tuple(f"{kind}:{i}" for i in range(len(found)))
    raise AssertionError("TensorFlow always has a CPU device")


def _check_backend() -> None:
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow":  # Else importing Keras may fail, where that backend isn't installed.
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise StrategyError(
            asked="tf.distribute strategies train Keras models on the TensorFlow backend",
            found=f"Keras runs on {backend!r}",
            remedy="Start with KERAS_BACKEND=tensorflow, or mend ~/.keras/keras.json",
        )
