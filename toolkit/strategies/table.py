"""The strategies by name: `create` makes one and knows what "auto" means, `describe` says what one is."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster import Membership, discover
from toolkit.devices.inventory import take_own_gpus
from toolkit.errors import StrategyError
from toolkit.strategies.check import watching
from toolkit.strategies.options import (
    GradientExchange,
    LocalSteps,
    Options,
    ParameterServerOptions,
    check_served,
    check_together,
    has_options,
    options_of,
    set_options,
)

if TYPE_CHECKING:
    import tensorflow as tf

_LOG = logging.getLogger(__name__)

NAMES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server")


def create(
    name: str = "auto",
    *,
    devices: Sequence[str] = (),
    membership: Membership | None = None,
    start_timeout: float | None = None,
    parameter_server: ParameterServerOptions | None = None,
    gradients: GradientExchange | None = None,
    communication: str = "auto",
    shards: int | None = None,
    optimizer_state: str = "replicated",
    weights: str = "replicated",
    local: LocalSteps | None = None,
    batch_statistics: str = "batch",
    check: str = "none",
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
        weights: "replicated", or "sharded", under mirrored and multi_worker: each replica then keeps only its part of
            the trainable weights that layers make in the scope, of their gradients and of the optimizer's slots (ZeRO
            stage 3). A layer of any class has its whole weights while it is called. Embeddings and weights of fewer
            than 2,048 elements stay replicated. With `shards`, each such group of replicas keeps one copy.
        local: How replicas train by themselves and average every so many steps, under mirrored and multi_worker; None
            for an exchange of gradients in each step.
        batch_statistics: "batch": in a step of `fit`, BatchNormalization normalises the whole batch, as on one device,
            under mirrored and multi_worker; each such layer sends one message forward and one backward. In synchronous
            rounds of parameter servers, one worker computes each batch of such a model. "replica": each replica or
            worker normalises its own share, unless the layer has `synchronized=True`, and moving statistics are
            averaged at an epoch's end. That is faster, and has other numbers than one device.
        check: "first_step": the first step of `fit`, `evaluate`, `predict` and their like is computed once more, on one
            device, and every tensor of it compared; a difference that rounding doesn't explain raises. The script's
            own numbers stay the same to the bit. Of your own loop, the first call of a `tf.function` that calls
            `strategy.run` is compared. Beside parameter servers, rounds and steps in turn are. It costs a trace and a
            few steps, and one device, or the chief, must hold the model. If it can't hold a batch, its first rows are
            compared, but not beside parameter servers. "none": nothing is compared.

    Returns:
        An ordinary `tf.distribute.Strategy`.

    Raises:
        StrategyError: The name is unknown, Keras runs on another backend, or the strategy doesn't
            fit the cluster. In a step: it differs from one device's.
        ClusterError: TF_CONFIG is wrong, or another task can't be met.
        RequestError: Keras or TensorFlow is another version than those this works with, and it makes a difference.
    """
    StrategyError.check_choice(name, NAMES, asked=f"strategy {name!r}", found="there is no strategy of that name")
    exchange = GradientExchange() if gradients is None else gradients
    options = Options(
        gradients=exchange,
        local=local,
        optimizer_state=optimizer_state,
        weights=weights,
        shards=shards,
        batch_statistics=batch_statistics,
        check=check,
    )
    check_together(options)
    _check_backend()
    from toolkit.strategies.upstream import table

    table.check()
    from toolkit.strategies.fit.adapt import adapt_remat

    adapt_remat()
    # TensorFlow reads TF_CONFIG for every strategy, so a wrong one must be reported in any case.
    membership = membership or discover(os.environ)
    jobs = {task.job for task in membership.cluster.tasks} if membership else set()
    strategy: tf.distribute.Strategy
    outside = membership is not None and membership.task.job == "evaluator"
    if name == "parameter_server" or (name == "auto" and "ps" in jobs and not outside):
        check_served(options)
        from toolkit.strategies.parameter_servers import strategy as served

        who = _required(name, membership, tasks="--chief --workers=2 --ps=2")
        strategy = served.create(who.cluster, who.task, options=parameter_server, start_timeout=start_timeout)
        set_options(strategy, options)
        return strategy
    if membership is not None and "ps" in jobs and membership.task.job in ("worker", "ps"):
        raise StrategyError(
            asked=f"strategy {name} in {membership.task}",
            found="beside parameter servers, workers and ps serve the chief and train nothing themselves",
            remedy="Create parameter_server or auto, or start the chief only",
        )
    together = membership is not None and len(membership.cluster.tasks) > 1 and not outside
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
        devices = tuple(devices) or _all_devices()
        if name == "mirrored" or (name == "auto" and len(devices) > 1):
            from toolkit.strategies import mirrored

            strategy = mirrored.create(devices)
        else:
            strategy = _one_device(devices)
    _give_options(strategy, options)
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


def _one_device(devices: Sequence[str]) -> "tf.distribute.Strategy":
    """Returns TensorFlow's default strategy, which is plain Keras on the first device.

    Args:
        devices: Exactly one logical device, the first of its kind, such as ("GPU:0",).

    Raises:
        StrategyError: There are several, or it isn't the device that TensorFlow uses by default.
    """
    import tensorflow as tf

    first = _first_device()
    if tuple(devices) != (first,):
        raise StrategyError(
            asked=f"strategy one_device on {', '.join(devices)}",
            found=f"it uses one device, here {first}",
            remedy="Configure gpus=1, or create mirrored, which takes any devices",
        )
    return tf.distribute.get_strategy()


def _first_device() -> str:
    """Returns the logical device of TensorFlow's default strategy: "GPU:0", or "CPU:0" without a GPU."""
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def describe(strategy: "tf.distribute.Strategy") -> dict[str, Any]:
    """Returns the description of a strategy as JSON values, for a run's summary.

    Args:
        strategy: Any, made by `create` or not.

    Returns:
        These, by name:

        - strategy: The name by which `create` makes such a one; for others the name of the class.
        - replicas: How many copies of the model train; under parameter servers the number of workers.
        - devices: Logical devices of this process, such as "CPU:0", in the order in which its replicas use them.
        - cluster: All tasks' addresses by job, as in TF_CONFIG; only where several processes may take part.
        - mesh: {"shards": ..., "groups": ...}, under mirrored and multi_worker made here: how many replicas hold one
          copy of what is sharded, if something is, and how many times.
        - optimizer_state: "replicated" or "sharded", under mirrored and multi_worker made here. With sharded weights it
          is "sharded": their slots are.
        - weights: "replicated" or "sharded", likewise.
        - batch_statistics: "replica", only where each replica normalises its own share of a batch.
        - compression: Such as "powersgd, rank 4"; only where gradients are compressed.
        - local_steps: The `LocalSteps`, by name; only where replicas train by themselves.
        - communication: "nccl" or "ring", by which processes exchange tensors; under multi_worker only.
    """
    import tensorflow as tf

    # `create`'s cluster also has the evaluators; TensorFlow's own ParameterServerStrategy has no resolver.
    resolver = strategy.cluster_resolver
    cluster = getattr(strategy, "cluster", None) or (resolver and resolver.cluster_spec())
    described: dict[str, Any] = {"strategy": type(strategy).__name__, "replicas": strategy.num_replicas_in_sync}
    if cluster and isinstance(strategy, tf.distribute.ParameterServerStrategy):
        workers = len(cluster.as_dict()["worker"])
        described |= {"strategy": "parameter_server", "replicas": workers, "devices": list(_all_devices())}
    elif type(strategy).__name__ == "_DefaultDistributionStrategy":  # It doesn't say which device it uses.
        described |= {"strategy": "one_device", "devices": [_first_device()]}
    else:
        if isinstance(strategy, tf.distribute.MirroredStrategy):
            described["strategy"] = "mirrored"
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            from toolkit.strategies.step.collectives import communication_of

            described |= {"strategy": "multi_worker", "communication": communication_of(strategy)}
        from toolkit.strategies.mesh import is_toolkit_strategy, mesh_of

        if is_toolkit_strategy(strategy):
            described["mesh"] = dataclasses.asdict(mesh_of(strategy))
            weights = described["weights"] = options_of(strategy).weights
            state = options_of(strategy).optimizer_state
            described["optimizer_state"] = "sharded" if weights == "sharded" else state
            if (statistics := options_of(strategy).batch_statistics) != "batch":
                described["batch_statistics"] = statistics
            if (local := options_of(strategy).local) is not None:
                described["local_steps"] = dataclasses.asdict(local)
            if (exchange := options_of(strategy).gradients).compression != "none":
                described["compression"] = exchange.compressed_by
        devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
        described["devices"] = [f"{device.device_type}:{device.device_index}" for device in devices]
    return {**described, "cluster": cluster.as_dict()} if cluster else described


def _all_devices() -> tuple[str, ...]:
    """Returns this process's logical devices: all GPUs that TensorFlow shows, or else all CPU devices."""
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        # Once a chief is connected, TensorFlow also lists the devices of its workers and ps.
        jobs = (tf.DeviceSpec.from_string(device.name).job for device in tf.config.list_logical_devices(kind))
        found = [job for job in jobs if job not in ("worker", "ps")]
        if found:
            return tuple(f"{kind}:{i}" for i in range(len(found)))
    raise AssertionError("TensorFlow always has a CPU device")


def _give_options(strategy: "tf.distribute.Strategy", options: Options) -> None:
    """Gives a strategy its options, unless it was created before with others.

    Raises:
        StrategyError: It was, or its replicas can't be divided into such groups.
    """
    from toolkit.strategies import mesh

    if options.shards is not None:
        mesh.check_shards(strategy, options.shards)
    if strategy.num_replicas_in_sync == 1:
        asked = [f"compression={options.gradients.compression}"] if options.gradients.compression != "none" else []
        asked += ["LocalSteps"] if options.local is not None else []
        if options.check != "none":
            _LOG.info("One replica trains: check=%r has nothing to compare", options.check)
        if asked:
            _LOG.warning("One replica trains, and exchanges nothing: %s has no effect", asked[0])
        return
    if options.check != "none" or watching.session() is not None:
        from toolkit.strategies.check import loops

        loops.watch_loops()
    before = options_of(strategy)
    if has_options(strategy) and before != options:
        names = [each.name for each in dataclasses.fields(Options)]
        name = next(name for name in names if getattr(before, name) != getattr(options, name))
        raise StrategyError(
            asked=f"a second strategy of several workers, with {name}={_short(getattr(options, name))}",
            found=f"a process has one, and it was made with {name}={_short(getattr(before, name))}",
            remedy=f"Give {name} to both calls of create, or to the first one only and use what it has returned",
        )
    set_options(strategy, options)


def _short(value: Any) -> str:
    """Returns how to write a value, without fields that have their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    others = (f"{name}={here!r}" for name, here in given if here != getattr(type(value), name, None))
    return f"{type(value).__name__}({', '.join(others)})"
