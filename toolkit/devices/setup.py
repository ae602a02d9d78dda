"""Configures TensorFlow's devices before it starts, and describes the result."""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from toolkit.devices import inventory as _inventory
from toolkit.devices.inventory import Gpu, Inventory
from toolkit.devices.request import MOST_EMULATED, DeviceRequest
from toolkit.devices.visible import own_gpus, resolve, shown
from toolkit.errors import DeviceError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Setup", "configure", "emulated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The result of `configure`. Print it with rich for a table, with `str` for plain lines.

    Attributes:
        logical_devices: One name for each replica, such as ("GPU:0", "GPU:1").
        emulated: True where logical CPU devices stand in for GPUs.
        gpus: The physical GPUs behind them, in words.
        memory: How much of each GPU is taken, in words.
        inter_op_threads: Operations run at once; 0 is TensorFlow's choice.
        intra_op_threads: Threads inside one operation; 0 is TensorFlow's choice.
        soft_placement: Whether an operation without a kernel for its device may run elsewhere.
        log_placement: Whether TensorFlow logs where each operation runs.
        cores: CPU cores this process may use.
    """

    logical_devices: tuple[str, ...]
    emulated: bool
    gpus: tuple[str, ...]
    memory: str
    inter_op_threads: int
    intra_op_threads: int
    soft_placement: bool
    log_placement: bool
    cores: int

    @property
    def replicas(self) -> int:
        """The number of replicas that these devices hold."""
        return len(self.logical_devices)

    def rows(self) -> list[tuple[str, str]]:
        """Returns pairs of a label and a value, in reading order."""
        threads = [str(n) if n else "TensorFlow's choice" for n in (self.inter_op_threads, self.intra_op_threads)]
        stand_in = f" (CPU devices standing in for GPUs, sharing {self.cores} cores)" if self.emulated else ""
        return [
            ("replicas", f"{self.replicas}{stand_in}"),
            ("logical devices", ", ".join(self.logical_devices)),
            ("GPUs", "; ".join(self.gpus) or "none"),
            ("GPU memory", self.memory if self.gpus else "no GPU in use"),
            ("threads between operations", threads[0]),
            ("threads inside an operation", threads[1]),
            ("soft placement", "on" if self.soft_placement else "off"),
            ("placement log", "on" if self.log_placement else "off"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {value}" for what, value in self.rows())

    def __rich__(self) -> "Table":
        from rich.table import Table

        table = Table(title="devices", title_justify="left", show_header=False)
        for what, value in self.rows():
            table.add_row(what, value)
        return table


_done: tuple[DeviceRequest, Setup, str] | None = None


def configure(**arguments: Any) -> Setup:
    """Configures the devices of this process. Call it once, before anything else touches TensorFlow.

    Called again with the same request, it does nothing and returns the same value.

    Args:
        gpus: How many replicas; None for all GPUs, or one CPU device where there is none.
        visible_devices: Which GPUs, as CUDA_VISIBLE_DEVICES is written, with nvidia-smi's numbers.
            Needs a process started with CUDA_DEVICE_ORDER=PCI_BUS_ID where there are several cards;
            `toolkit.devices.restart` sees to that.
        emulate: "auto" lets logical CPU devices stand in where the machine has no GPU at all;
            "never" and "always" are what they say.
        memory: "growth", a fraction of the card such as 0.4, a limit in MiB such as 4096, or "all".
        split: Logical devices on each GPU.
        inter_op_threads: Operations run at once; 0 for TensorFlow's choice.
        intra_op_threads: Threads inside one operation; 0 for TensorFlow's choice.
        soft_placement: Let an operation without a kernel for its device run elsewhere.
        log_placement: Log where each operation runs.

    Returns:
        What was done.

    Raises:
        DeviceError: The request can't be met on this machine, or TensorFlow has already started.
    """
    global _done
    request = DeviceRequest(**arguments)
    if _done is not None:
        if _done[0] == request:
            return _done[1]
        raise DeviceError(
            asked=f"devices.configure({_differences(_done[0], request)}) changes the devices",
            found=f"they were configured at {_done[2]}, and TensorFlow can't change them in the same process",
            remedy="Put all arguments into that first call",
        )
    setup = _apply(request, _inventory.take())
    caller = sys._getframe(1)
    _done = (request, setup, f"{caller.f_code.co_filename}:{caller.f_lineno}")
    return setup


def emulated() -> bool:
    """Returns whether `configure` made logical CPU devices stand in for GPUs in this process."""
    return _done is not None and _done[1].emulated


def _differences(before: DeviceRequest, after: DeviceRequest) -> str:
    names = [field.name for field in dataclasses.fields(DeviceRequest)]
    return ", ".join(f"{n}={getattr(after, n)!r}" for n in names if getattr(after, n) != getattr(before, n))


def _apply(request: DeviceRequest, inventory: Inventory) -> Setup:
    import tensorflow as tf

    physical = tf.config.list_physical_devices("GPU")
    card_ids = shown(os.environ, inventory)
    chosen = [] if request.emulate == "always" else _choose(request, inventory, physical, card_ids)
    emulated = not chosen and (request.gpus is not None or request.emulate == "always")
    replicas = request.gpus or (len(chosen) * request.split if chosen else 1)
    if chosen:
        chosen = chosen[: -(-replicas // request.split)]
    elif emulated:
        _may_emulate(request, inventory, replicas)
    cards = _cards(physical, card_ids, inventory)
    totals = [_total_mib(cards.get(device.name), inventory) for device in chosen]
    try:
        if chosen != physical:
            tf.config.set_visible_devices(chosen, "GPU")
        _configure_tensorflow(tf, request, chosen, totals, cpu_devices=replicas if emulated else 1)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            asked="devices.configure sets up TensorFlow's devices",
            found=f"TensorFlow has already fixed them ({_fixed(tf)}; it says: {error})",
            remedy="Move the call before the first operation, model, seed or strategy of the program",
        ) from error
    kind = "GPU" if chosen else "CPU"
    return Setup(
        logical_devices=tuple(f"{kind}:{i}" for i in range(replicas)),
        emulated=emulated,
        gpus=tuple(
            f"card {cards[device.name]}" if device.name in cards else f"TensorFlow's {device.name}" for device in chosen
        ),
        memory=str(request.amount),
        inter_op_threads=request.inter_op_threads,
        intra_op_threads=request.intra_op_threads,
        soft_placement=request.soft_placement,
        log_placement=request.log_placement,
        cores=inventory.cores,
    )


def _choose(request: DeviceRequest, inventory: Inventory, physical: list, card_ids: tuple[str, ...] | None) -> list:
    """Returns TensorFlow's objects of the physical GPUs to use; [] if none are wanted or there are none."""
    if request.visible_devices is not None:
        wanted = resolve(request.visible_devices, inventory)
        if not wanted:
            return []
        if card_ids is None:
            raise DeviceError(
                asked=f"visible_devices={request.visible_devices!r} names GPUs by nvidia-smi's numbers",
                found="this process started without CUDA_DEVICE_ORDER=PCI_BUS_ID, so CUDA may number them differently",
                remedy=f"Call toolkit.devices.restart({request.visible_devices!r}) first in the program",
            )
        missing = [identity for identity in wanted if identity not in card_ids[: len(physical)]]
        if missing:
            raise DeviceError(
                asked=f"visible_devices={request.visible_devices!r} names GPU {', '.join(missing)}",
                found=_describe(inventory, physical),
                remedy="Add that GPU to CUDA_VISIBLE_DEVICES, or run toolkit.devices.restart first in the program",
            )
        available = [physical[card_ids.index(identity)] for identity in wanted]
    else:
        available = [physical[position] for position in own_gpus(os.environ, len(physical))]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip("\"' ") in ("", "-1")
        if not available and inventory.gpus and not hidden:
            raise DeviceError(
                asked="the GPUs of this machine were asked for",
                found=_describe(inventory, physical),
                remedy="Install TensorFlow's CUDA with pip install 'tf-strategy-toolkit[gpu]', or pass emulate=always",
            )
    if available and request.gpus is not None and request.gpus > len(available) * request.split:
        raise DeviceError(
            asked=f"gpus={request.gpus} asks for {request.gpus} replicas",
            found=f"{len(available)} GPUs are usable, each as {request.split} logical devices; {inventory.describe()}",
            remedy=f"Ask for at most gpus={len(available) * request.split}, or pass emulate=always for CPU stand-ins",
        )
    return available


def _describe(inventory: Inventory, physical: list) -> str:
    return f"TensorFlow sees {len(physical)} GPUs in this process; {inventory.describe()}"


def _may_emulate(request: DeviceRequest, inventory: Inventory, replicas: int) -> None:
    if request.emulate == "never":
        raise DeviceError(
            asked=f"gpus={replicas} with emulate=never asks for real GPUs",
            found=inventory.describe(),
            remedy="Pass emulate=auto to let CPU devices stand in",
        )
    if replicas > MOST_EMULATED:
        raise DeviceError(
            asked=f"gpus={replicas} asks for {replicas} replicas",
            found=f"{inventory.describe()}, and at most {MOST_EMULATED} CPU devices may stand in",
            remedy=f"Ask for at most gpus={MOST_EMULATED}",
        )


def _configure_tensorflow(tf, request: DeviceRequest, gpus: list, totals: list, *, cpu_devices: int) -> None:
    """Sets memory, logical devices and threads; `totals` are the MiB of each GPU, None if unknown."""
    for device, total in zip(gpus, totals, strict=True):
        if request.amount.growth:
            tf.config.experimental.set_memory_growth(device, True)
            continue
        limit = request.amount.per_logical_device(total, request.split)
        if limit is not None:
            one = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(device, [one] * request.split)
    if cpu_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * cpu_devices)
    if request.inter_op_threads:
        tf.config.threading.set_inter_op_parallelism_threads(request.inter_op_threads)
    if request.intra_op_threads:
        tf.config.threading.set_intra_op_parallelism_threads(request.intra_op_threads)
    tf.config.set_soft_device_placement(request.soft_placement)
    tf.debugging.set_log_device_placement(request.log_placement)


def _cards(physical: list, card_ids: tuple[str, ...] | None, inventory: Inventory) -> dict[str, Gpu]:
    """Returns the card of each of TensorFlow's physical GPUs, by TensorFlow's name, if it is known."""
    by_id = {str(gpu.index): gpu for gpu in inventory.gpus}
    pairs = zip(physical, card_ids or (), strict=False)
    return {device.name: by_id[identity] for device, identity in pairs if identity in by_id}


def _total_mib(card: Gpu | None, inventory: Inventory) -> int | None:
    if card is not None:
        return card.memory_mib
    totals = {gpu.memory_mib for gpu in inventory.gpus if not gpu.mig_uuids}
    return totals.pop() if len(totals) == 1 else None  # All cards are alike, so it doesn't matter which one it is.


def _fixed(tf) -> str:
    try:
        names = [device.name for device in tf.config.list_logical_devices()]
    except RuntimeError:
        return "its devices can't be listed"
    return "logical devices " + ", ".join(name.removeprefix("/device:") for name in names)
