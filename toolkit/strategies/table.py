"""The names of the strategies, and the meaning of "auto"."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.cluster import Membership, discover
from toolkit.devices.shared_node import take_own_gpus
from toolkit.errors import StrategyError
from toolkit.strategies import one_device
from toolkit.strategies.description import all_devices
from toolkit.strategies.option_rules import check, check_served, give
from toolkit.strategies.options import GradientExchange, Options, ParameterServerOptions

if TYPE_CHECKING:
    import tensorflow as tf

    from toolkit.strategies.options import LocalSteps

__all__ = ["NAMES", "create"]

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
    local: "LocalSteps | None" = None,
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
            each replica has its own GPU, the ring elsewhere.
        shards: How many replicas together hold one copy of the sharded layers, under mirrored and multi_worker; such
            groups of replicas train data parallel. None for all replicas in one group; with 1, every replica holds
            whole layers.
        optimizer_state: "replicated", or "sharded", under mirrored and multi_worker: each replica then keeps only its
            part of the optimizer's slots for layers that every replica has (ZeRO stage 1, arXiv 1910.02054).
        local: How replicas train by themselves and average every so many steps, under mirrored and multi_worker; None
            for an exchange of gradients in each step.

    Returns:
        An ordinary `tf.distribute.Strategy`.

    Raises:
        StrategyError: The name is unknown, Keras runs on another backend, or the strategy doesn't
            fit the cluster.
        ClusterError: TF_CONFIG is wrong, or another task can't be met.
        RequestError: Keras or TensorFlow is another version than those this works with, and it makes a difference.
    """
    StrategyError.check_choice(name, NAMES, asked=f"strategy {name!r}", found="there is no strategy of that name")
    exchange = GradientExchange() if gradients is None else gradients
    options = Options(gradients=exchange, local=local, optimizer_state=optimizer_state, shards=shards)
    check(options)
    _check_backend()
    from toolkit.strategies.fit.recompute import adapt_remat
    from toolkit.support import taken_over

    taken_over.check()
    adapt_remat()
    # TensorFlow reads TF_CONFIG for every strategy, so a wrong one must be reported in any case.
    membership = membership or discover(os.environ)
    jobs = {task.job for task in membership.cluster.tasks} if membership else set()
    outside = membership is not None and membership.task.job == "evaluator"
    if name == "parameter_server" or (name == "auto" and "ps" in jobs and not outside):
        check_served(options)
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
        take_own_gpus()
        from toolkit.strategies import multi_worker

        strategy = multi_worker.create(
            who.cluster,
            who.task,
            devices=tuple(devices),
            start_timeout=start_timeout,
            communication=communication,
            every_step=local is None,
        )
    elif communication != "auto":
        raise StrategyError(
            asked=f"communication={communication!r}",
            found="this process trains alone; communication is for several processes",
            remedy="Leave it out",
        )
    else:
        devices = tuple(devices) or all_devices()
        if name == "mirrored" or (name == "auto" and len(devices) > 1):
            from toolkit.strategies import mirrored

            strategy = mirrored.create(devices)
        else:
            strategy = one_device.create(devices)
    give(strategy, options)
    return strategy


def _required(name: str, membership: Membership | None, *, tasks: str) -> Membership:
    if membership is None:
        raise StrategyError(
            asked=f"strategy {name} trains in several processes",
            found="nothing says who takes part: TF_CONFIG is not set",
            remedy=f"Start with toolkit launch {tasks}, set TF_CONFIG, or name a file of tf_configs/",
        )
    return membership


def _check_backend() -> None:
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow":  # Otherwise importing Keras may fail, if that backend isn't installed.
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise StrategyError(
            asked="tf.distribute strategies train Keras models on the TensorFlow backend",
            found=f"Keras runs on {backend!r}",
            remedy="Start with KERAS_BACKEND=tensorflow, or correct ~/.keras/keras.json",
        )
