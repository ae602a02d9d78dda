"""How several processes exchange tensors: with NCCL between GPUs, or TensorFlow's ring over gRPC.

TensorFlow takes the ring unless it is asked for NCCL, with GPUs too. NCCL wants a GPU for each replica, and all its
calls in one order on every device. What is read and wrapped of private parts of TensorFlow here is tested in
`tests/strategies/test_exchange_internals.py`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from toolkit import cluster as _cluster
from toolkit.errors import StrategyError
from toolkit.strategies.options import COMMUNICATIONS
from toolkit.support.wrapping import attach

__all__ = ["choose", "communication_of", "kind_of", "number_by_call", "options_for", "ordering_token"]

_IMPLEMENTATIONS = {
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
}


def choose(
    asked: str,
    *,
    gpus: Sequence[int],
    addresses: Sequence[str],
    own: str,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, str]:
    """Returns "nccl" or "ring", and why it isn't NCCL.

    Args:
        asked: "auto", "nccl" or "ring".
        gpus: Of each GPU that this process uses, how many logical devices it has.
        addresses: "host:port" of each process that trains.
        own: This one's.
        environ: Environment variables.

    Raises:
        StrategyError: There is no such way, or NCCL is asked for where it can't be.
    """
    StrategyError.check_choice(asked, COMMUNICATIONS, asked=f"communication={asked!r}")
    host = own.rpartition(":")[0]
    here = sum(address.rpartition(":")[0] == host for address in addresses)
    if asked == "ring":
        return "ring", "communication='ring' was set"
    if why := _lacking(gpus):
        if asked == "nccl":
            raise StrategyError(
                asked="communication='nccl'", found=why, remedy="Leave it out, or give each replica its own GPU"
            )
    elif asked == "auto" and here > 1 and "CUDA_VISIBLE_DEVICES" not in environ:
        why = f"{here} workers on {host} may use the same GPUs, because CUDA_VISIBLE_DEVICES isn't set"
    return ("ring" if why else "nccl"), why


def _lacking(gpus: Sequence[int]) -> str:
    if not gpus:
        return "there is no GPU to use"
    return "a GPU is split into several logical devices" if max(gpus) > 1 else ""


def options_for(options: Any, asked: str, resolver: Any) -> tuple[Any, str]:
    """Returns TensorFlow's options for a strategy, and why they don't choose NCCL; a given implementation is kept.

    Args:
        options: TensorFlow's `CommunicationOptions`; None for its defaults.
        asked: As `choose` takes it.
        resolver: A resolver of TensorFlow's, or None.
    """
    options = options or tf.distribute.experimental.CommunicationOptions()
    if options.implementation != tf.distribute.experimental.CommunicationImplementation.AUTO and asked == "auto":
        return options, "" if kind_of(options) == "nccl" else "CommunicationOptions ask for it"
    jobs = resolver.cluster_spec().as_dict() if resolver is not None else {}
    addresses, own = [], ""
    if jobs and resolver.task_type:
        together = _cluster.Cluster(jobs)
        addresses = [together.address(task) for task in together.synchronous]
        own = together.address(_cluster.Task(resolver.task_type, resolver.task_id))
    gpus = [len(tf.config.get_logical_device_configuration(gpu) or [1]) for gpu in tf.config.get_visible_devices("GPU")]
    kind, why = choose(asked, gpus=gpus, addresses=addresses, own=own)
    if kind == "ring" and asked == "auto":  # TensorFlow chooses it.
        return options, why
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=_IMPLEMENTATIONS[kind],
    ), why


def kind_of(options: Any) -> str:
    """Returns TensorFlow's choice for some options: "nccl" or "ring"."""
    return "nccl" if options.implementation == _IMPLEMENTATIONS["nccl"] else "ring"


def number_by_call(strategy: tf.distribute.Strategy) -> None:
    """Allows functions with collectives in loops under a strategy. Later calls do nothing."""
    ways = (getattr(strategy.extended, name, None) for name in ("_cross_device_ops", "_collective_ops"))
    for launcher in {id(each): each for way in ways for each in getattr(way, "_launchers", ())}.values():
        attach(launcher, "_use_unique_instance_key", _unique_outside_loops)


def communication_of(strategy: tf.distribute.Strategy) -> str:
    """Returns how the processes of a strategy exchange tensors: "nccl" or "ring"."""
    return kind_of(strategy.extended._communication_options)


def ordering_token(strategy: tf.distribute.Strategy, replica: int) -> tf.Tensor:
    """Returns the resource with which TensorFlow orders its calls of NCCL on one of this process's replicas.

    Other calls on the same device must be ordered by the same one.
    """
    return strategy.extended._cross_device_ops._launchers[replica]._get_ordering_token()


def _unique_outside_loops(original: Callable, launcher: Any) -> bool:
    """Numbers the collectives of a function that is traced in a branch or a loop.

    Else TensorFlow numbers them when it is called, through a placeholder that nothing feeds there:
    `compile(steps_per_execution=2)` then fails on several replicas with "You must feed a value for
    placeholder". All workers trace the same functions in the same order.
    """
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not getattr(outer, "is_control_flow_graph", False) and bool(original(launcher))
