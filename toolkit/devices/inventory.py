"""The devices of this machine as data: NVML's GPUs and the cores that this process may use."""

import dataclasses
import os

__all__ = ["Gpu", "Inventory", "cores", "take", "text"]


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
