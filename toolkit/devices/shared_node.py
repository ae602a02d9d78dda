"""Divides a node's GPUs between several tasks if a launcher shows all GPUs to each task.

`srun --ntasks-per-node=4` binds no GPU to a task unless it is asked to (--gpus-per-task, --gpu-bind), and mpirun never
does. Each task would take all of them, and the second would find no memory left. So each takes its own part, by its
number among the node's tasks: SLURM_LOCALID, or OMPI_COMM_WORLD_LOCAL_RANK.
"""

import logging
import os
from collections.abc import Mapping

from toolkit.cluster.sources import open_mpi, slurm
from toolkit.errors import DeviceError
from toolkit.support import status

__all__ = ["own_gpus", "take_own_gpus"]

_LOG = logging.getLogger(__name__)
# Set by srun if it has bound GPUs to tasks: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_BIND")


def own_gpus(environ: Mapping[str, str], count: int) -> range:
    """Returns the positions of a process's GPUs among those that it sees: all of them, or its part of a node's.

    Args:
        environ: The process's environment.
        count: How many GPUs it sees.

    Raises:
        DeviceError: They can't be divided among the node's tasks.
        ClusterError: A launcher's variables aren't what they should be.
    """
    every = range(count)
    if status.SOCKET in environ:  # `toolkit launch` has already assigned GPUs to this task.
        return every
    place = open_mpi.place_on_host(environ) or slurm.place_on_node(environ)
    if place is None or count < 2:
        return every
    local, tasks = place
    bound = any(environ.get(name, "none") not in ("none", "") for name in _BOUND)
    if tasks == 1 or bound or count < tasks:  # With fewer GPUs than tasks, each task was bound to one of several.
        return every
    if count % tasks:
        raise DeviceError(
            asked=f"{tasks} tasks were started on this node, and each sees all of its {count} GPUs",
            found="they can't be divided into equal parts",
            remedy="Bind them: srun --gpus-per-task=1, or give each task its CUDA_VISIBLE_DEVICES",
        )
    each = count // tasks
    return every[local * each : (local + 1) * each]


def take_own_gpus() -> None:
    """Hides the GPUs of this node's other tasks, before TensorFlow starts.

    Raises:
        DeviceError: TensorFlow has started with all of them, or they can't be divided.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    if len(visible) < len(tf.config.list_physical_devices("GPU")):  # The script or `configure` has chosen devices.
        return
    own = own_gpus(os.environ, len(visible))
    if len(own) == len(visible):
        return
    try:
        tf.config.set_visible_devices([visible[position] for position in own], "GPU")
    except RuntimeError as error:
        raise DeviceError(
            asked=f"several tasks were started on this node, and each sees all of its {len(visible)} GPUs",
            found="TensorFlow has started in this one, and has taken them all",
            remedy="Make the strategy before the first operation, or bind them: srun --gpus-per-task=1",
        ) from error
    _LOG.info("Other tasks of this node see its %d GPUs, too: this one takes %s", len(visible), _named(own))


def _named(own: range) -> str:
    return f"GPU {own[0]}" if len(own) == 1 else f"GPUs {own[0]} to {own[-1]}"
