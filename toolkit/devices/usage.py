"""How much memory TensorFlow's allocators have had in use at most."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


def peak_memory(strategy: "tf.distribute.Strategy") -> list[int]:
    """Returns the most bytes that the allocator of each of this process's replicas had in use since it began.

    Logical CPU devices share one allocator, so they are one figure.

    Args:
        strategy: Whose replicas are meant.

    Returns:
        One number for each GPU, or one for all CPUs; [] where TensorFlow doesn't count, as for a few hundred numbers on
        a CPU, and beside parameter servers, whose replicas are in other processes.
    """
    import tensorflow as tf

    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return []
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # The default strategy doesn't say which device it uses.
        devices = [f"/device:{'GPU' if tf.config.list_logical_devices('GPU') else 'CPU'}:0"]
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    names = dict.fromkeys("CPU:0" if spec.device_type == "CPU" else f"GPU:{spec.device_index}" for spec in specs)
    try:
        peaks = [int(tf.config.experimental.get_memory_info(name)["peak"]) for name in names]
    except (ValueError, tf.errors.OpError):  # Not every allocator counts.
        return []
    # A CPU's allocator counts whole regions, and none for tensors that are small: 0 then isn't what was in use.
    return peaks if all(peaks) else []
