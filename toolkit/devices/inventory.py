"""The devices of this machine as data, nvidia-smi's information: GPUs, who uses which of them, and how much; cores."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import psutil

__all__ = ["Gpu", "Host", "Inventory", "Process", "Usage", "cores", "host", "look", "take", "text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU, as `nvidia-smi -L` lists it.

    Attributes:
        index: nvidia-smi's number, which is the order of the PCI bus.
        name: Product name.
        uuid: "GPU-..." string.
        memory_mib: Total memory in MiB.
        mig_uuids: "MIG-..." strings of its MIG instances, empty where MIG is off.
    """

    index: int
    name: str
    uuid: str
    memory_mib: int
    mig_uuids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.memory_mib} MiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """The devices of this machine.

    Attributes:
        gpus: In nvidia-smi's order; empty where NVML finds none.
        without_gpus: Why `gpus` is empty, in NVML's own words; "" where it isn't.
        unreadable: GPUs that NVML can't read and that aren't in `gpus`, such as "GPU 3 (GPU is lost)".
        cores: CPU cores this process may use.
    """

    gpus: tuple[Gpu, ...] = ()
    without_gpus: str = ""
    unreadable: tuple[str, ...] = ()
    cores: int = 1

    def describe(self) -> str:
        """Returns a clause such as "this machine has 2 GPUs (0: ..., 1: ...)"."""
        if not self.gpus:
            return f"this machine has no GPU ({self.without_gpus or 'NVML lists none'})"
        count = "1 GPU" if len(self.gpus) == 1 else f"{len(self.gpus)} GPUs"
        lost = f"; NVML can't read {', '.join(self.unreadable)}" if self.unreadable else ""
        return f"this machine has {count} ({'; '.join(map(str, self.gpus))}{lost})"


def cores() -> int:
    """Returns the number of CPU cores this process may run on (its affinity mask, where there is one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def take() -> Inventory:
    """Asks NVML for the GPUs. Never raises: without a driver there are none, and the result gives the reason."""
    import pynvml  # Imported late to keep `import toolkit.devices` cheap.

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(without_gpus=f"NVML: {error}", cores=cores())
    gpus, unreadable = [], []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(pynvml, index))
            except pynvml.NVMLError as error:  # This GPU may have failed; the others still work.
                unreadable.append(f"GPU {index} ({error})")
    except pynvml.NVMLError as error:
        return Inventory(without_gpus=f"NVML: {error}", cores=cores())
    finally:
        pynvml.nvmlShutdown()
    why = f"NVML can't read {', '.join(unreadable)}" if unreadable and not gpus else ""
    return Inventory(gpus=tuple(gpus), without_gpus=why, unreadable=tuple(unreadable), cores=cores())


def _gpu(pynvml, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        name=text(pynvml.nvmlDeviceGetName(handle)),
        uuid=text(pynvml.nvmlDeviceGetUUID(handle)),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20,
        mig_uuids=_mig_uuids(pynvml, handle),
    )


def _mig_uuids(pynvml, handle) -> tuple[str, ...]:
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:  # Cards before Ampere answer "not supported".
        return ()
    found = []
    for slot in range(slots):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError:  # An empty slot.
            continue
        found.append(text(pynvml.nvmlDeviceGetUUID(instance)))
    return tuple(found)


def text(value: str | bytes) -> str:
    """Returns a name from NVML; its bindings returned bytes up to version 11."""
    return value.decode() if isinstance(value, bytes) else value


_USED = 0.1  # A share of a card's memory; the driver alone uses 1 to 2 %.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process on a GPU.

    Attributes:
        pid: The process's id; in a container it may be the host's.
        name: Its name; "" where it can't be seen from here.
        memory_mib: MiB of the GPU's memory that it uses; None where NVML doesn't say.
        computes: False for one that only draws, as a desktop does.
    """

    pid: int
    name: str
    memory_mib: int | None
    computes: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """A GPU's current state. What a card doesn't report is None.

    Attributes:
        gpu: The card.
        pci: Its place on the PCI bus.
        memory_used_mib: MiB of its memory that all processes and the driver take.
        utilisation: Per cent of the time in which something ran on it.
        temperature: Its temperature in degrees Celsius.
        watts: The power that it draws.
        watts_limit: The power that it may draw.
        processes: The processes that compute or draw pictures on it.
    """

    gpu: Gpu
    pci: str | None
    memory_used_mib: int | None
    utilisation: int | None
    temperature: int | None
    watts: float | None
    watts_limit: float | None
    processes: tuple[Process, ...]

    @property
    def users(self) -> str:
        """Names the users of a GPU other than this process and display servers; "" if there are none."""
        others = [each for each in self.processes if each.computes and each.pid != os.getpid()]
        words = [f"process {each.pid}{f', {each.name}' if each.name else ''}" for each in others]
        used = self.memory_used_mib or 0
        # A container doesn't see other containers' processes, but it sees their memory.
        if not words and used > _USED * self.gpu.memory_mib and not self.processes:
            return f"processes that aren't visible here ({used:,} MiB)"
        return "; ".join(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """This machine's current cores and memory.

    Attributes:
        cores: Cores that this process may use.
        cores_in_all: Cores that the machine has.
        cpu_percent: How busy all cores were since the last look; 0.0 at the first.
        memory_mib: MiB of memory that the machine has.
        memory_used_mib: MiB that aren't available to another program.
    """

    cores: int
    cores_in_all: int
    cpu_percent: float
    memory_mib: int
    memory_used_mib: int


def look() -> tuple[Inventory, tuple[Usage, ...]]:
    """Asks NVML for the GPUs and their use. Never raises: see `Inventory.without_gpus`."""
    inventory = take()
    if not inventory.gpus:
        return inventory, ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # The driver was unloaded meanwhile.
        return dataclasses.replace(inventory, gpus=(), without_gpus=f"NVML: {error}"), ()
    try:
        return inventory, tuple(_usage(pynvml, gpu) for gpu in inventory.gpus)
    finally:
        pynvml.nvmlShutdown()


def host() -> Host:
    """Measures cores and memory."""
    memory = psutil.virtual_memory()
    return Host(
        cores=cores(),
        cores_in_all=psutil.cpu_count() or 1,
        cpu_percent=psutil.cpu_percent(),
        memory_mib=memory.total >> 20,
        memory_used_mib=(memory.total - memory.available) >> 20,
    )


def _usage(pynvml: Any, gpu: Gpu) -> Usage:
    def reported(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except pynvml.NVMLError:  # "Not supported": a laptop's card has no fan, a MIG card no utilisation.
            return None

    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
    watts, limit = (
        reported(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        reported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
    )
    memory, busy, pci = (
        reported(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle)),
        reported(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle)),
        reported(lambda: pynvml.nvmlDeviceGetPciInfo(handle)),
    )
    return Usage(
        gpu=gpu,
        pci=None if pci is None else text(pci.busId),
        memory_used_mib=None if memory is None else int(memory.used) >> 20,
        utilisation=None if busy is None else int(busy.gpu),
        temperature=reported(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        watts=None if watts is None else watts / 1000,
        watts_limit=None if limit is None else limit / 1000,
        processes=_processes(pynvml, handle, reported),
    )


def _processes(pynvml: Any, handle: Any, reported: Callable) -> tuple[Process, ...]:
    found: dict[int, Process] = {}
    asked = {
        True: pynvml.nvmlDeviceGetComputeRunningProcesses,
        False: pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    }
    for computes, ask in asked.items():
        for each in reported(lambda ask=ask: ask(handle)) or ():
            memory = None if each.usedGpuMemory is None else int(each.usedGpuMemory) >> 20
            found.setdefault(
                each.pid, Process(pid=each.pid, name=_name(each.pid), memory_mib=memory, computes=computes)
            )
    return tuple(found[pid] for pid in sorted(found))


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # It has ended, or belongs to another container.
        return ""
