"""Describes a strategy for a run's summary."""

import dataclasses
from typing import TYPE_CHECKING, Any

from toolkit.strategies.one_device import first_device

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["all_devices", "describe"]


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
          copy of a model with sharded layers, and how many times.
        - optimizer_state: "replicated" or "sharded", under mirrored and multi_worker made here.
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
        described |= {"strategy": "parameter_server", "replicas": workers, "devices": list(all_devices())}
    elif type(strategy).__name__ == "_DefaultDistributionStrategy":  # It doesn't say which device it uses.
        described |= {"strategy": "one_device", "devices": [first_device()]}
    else:
        if isinstance(strategy, tf.distribute.MirroredStrategy):
            described["strategy"] = "mirrored"
        elif isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            from toolkit.strategies.exchange.communication import communication_of

            described |= {"strategy": "multi_worker", "communication": communication_of(strategy)}
        from toolkit.strategies.exchange.mesh import made_here, mesh_of
        from toolkit.strategies.options import options_of

        if made_here(strategy):
            described["mesh"] = dataclasses.asdict(mesh_of(strategy))
            described["optimizer_state"] = options_of(strategy).optimizer_state
            if (local := options_of(strategy).local) is not None:
                described["local_steps"] = dataclasses.asdict(local)
            if (exchange := options_of(strategy).gradients).compression != "none":
                described["compression"] = f"{exchange.compression}, rank {exchange.rank}"
        devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
        described["devices"] = [f"{device.device_type}:{device.device_index}" for device in devices]
    return {**described, "cluster": cluster.as_dict()} if cluster else described


def all_devices() -> tuple[str, ...]:
    """Returns this process's logical devices: all GPUs that TensorFlow shows, or else all CPU devices."""
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        # Once a chief is connected, TensorFlow also lists the devices of its workers and ps.
        jobs = (tf.DeviceSpec.from_string(device.name).job for device in tf.config.list_logical_devices(kind))
        found = [job for job in jobs if job not in ("worker", "ps")]
        if found:
            return tuple(f"{kind}:{i}" for i in range(len(found)))
    raise AssertionError("TensorFlow always has a CPU device")
