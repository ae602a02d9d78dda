"""Sets up this process's devices: GPUs, memory, logical devices and threads, before TensorFlow starts.

inventory   what is there, as data: GPUs through NVML, who uses them, and how much; cores. Which GPUs: what
            CUDA_VISIBLE_DEVICES accepts, numbered as nvidia-smi numbers them; those that are free; a task's part of a
            node's
capability  what the installed TensorFlow can do on a card, with its own kernels and with XLA
setup       one call that checks what is asked, configures TensorFlow and says what it did; how much of a GPU: growth,
            a fraction, a limit, or all
usage       how much memory was in use
"""

from toolkit.devices.inventory import Gpu, Inventory, cores, environment, resolve, restart, take
from toolkit.devices.setup import DeviceRequest, Memory, Setup, configure, emulated
from toolkit.devices.usage import peak_memory

__all__ = [
    "DeviceRequest",
    "Gpu",
    "Inventory",
    "Memory",
    "Setup",
    "configure",
    "cores",
    "emulated",
    "environment",
    "peak_memory",
    "resolve",
    "restart",
    "take",
]
