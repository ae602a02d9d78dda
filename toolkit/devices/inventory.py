"""The devices of this machine, nvidia-smi's information: cores, GPUs, who uses them, and which are this process's.

GPUs are chosen in CUDA_VISIBLE_DEVICES's syntax, with nvidia-smi's numbers.

CUDA numbers cards "fastest first" unless CUDA_DEVICE_ORDER=PCI_BUS_ID; nvidia-smi always numbers
them by PCI bus. CUDA reads both variables once, when it starts. So the numbers are made to agree
where a process starts: `environment` returns the variables for a child, and `restart` starts
this very process again with them. Nothing here changes `os.environ`.

The grammar and its meaning: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables

A launcher may show all of a node's GPUs to each of its tasks: `srun --ntasks-per-node=4` binds no GPU to a task unless
it is asked to (--gpus-per-task, --gpu-bind), and mpirun never does. Each task would take all of them, and the second
would find no memory left. So each takes its own part, by its number among the node's tasks: SLURM_LOCALID, or
OMPI_COMM_WORLD_LOCAL_RANK.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from toolkit.cluster.discovery import place_on_host
from toolkit.errors import DeviceError
from toolkit.support import status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU, as `nvidia-smi -L` lists it.

    Attributes:
        index: nvidia-smi's number, which is the order of the PCI bus.
        name: Product name.
        uuid: "GPU-..." string.
        memory_mib: Total memory in MiB.
        mig_uuids: "MIG-..." strings of its MIG instances, empty where MIG is off.
        capability: Its compute capability, such as (9, 0); None where NVML doesn't say.
    """

    index: int
    name: str
    uuid: str
    memory_mib: int
    mig_uuids: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.memory_mib} MiB"

    def with_capability(self) -> str:
        """Returns its number, name and compute capability, such as "GPU 0 (T4, compute capability 7.5)"."""
        capability = "unknown" if self.capability is None else ".".join(map(str, self.capability))
        return f"GPU {self.index} ({self.name}, compute capability {capability})"


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
        capability=_capability(pynvml, handle),
    )


def _capability(pynvml, handle) -> tuple[int, int] | None:
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return int(major), int(minor)


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


_LOG = logging.getLogger(__name__)

FREE = "free"  # The GPUs that no other program uses.


def resolve(visible_devices: str, inventory: Inventory) -> tuple[str, ...]:
    """Parses a value of CUDA_VISIBLE_DEVICES against the GPUs that exist.

    Args:
        visible_devices: "0,1", '"0,2,3"' with its quotes, "" or "-1" for none, "GPU-..." or
            "MIG-..." (any unambiguous beginning of one). As in CUDA, a -1 ends the list. Or "free": see `unused`.
        inventory: The cards there are.

    Returns:
        One id for each visible device, in the order given: nvidia-smi's number, or a MIG UUID.

    Raises:
        DeviceError: An entry is no id, or names no card, or the same card twice; or no card is free.
    """
    if visible_devices.strip() == FREE:
        return unused(os.environ, inventory)
    text = visible_devices.strip().strip("\"'").strip()
    entries = [entry.strip().strip("\"'") for entry in text.split(",")] if text else []
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    found: list[str] = []
    for entry in entries:
        identity = _identify(entry, visible_devices, inventory)
        if identity in found:
            raise DeviceError(
                asked=f"visible_devices={visible_devices!r} lists GPUs",
                found=f"it names GPU {identity} twice",
                remedy="Name each GPU once",
            )
        found.append(identity)
    return tuple(found)


def _identify(entry: str, visible_devices: str, inventory: Inventory) -> str:
    asked = f"visible_devices={visible_devices!r} names {entry!r}"
    if entry.isascii() and entry.isdigit():
        if int(entry) < len(inventory.gpus):
            return str(int(entry))
        raise DeviceError(asked=asked, found=inventory.describe(), remedy=_remedy(inventory))
    if entry.startswith(("GPU-", "MIG-")):
        names = {gpu.uuid: str(gpu.index) for gpu in inventory.gpus}
        names.update({mig: mig for gpu in inventory.gpus for mig in gpu.mig_uuids})
        matches = [identity for name, identity in names.items() if name.startswith(entry)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise DeviceError(
                asked=asked,
                found=f"{len(matches)} devices begin with that UUID",
                remedy="Give more of its letters",
            )
        raise DeviceError(asked=asked, found=inventory.describe(), remedy=_remedy(inventory))
    raise DeviceError(
        asked=asked,
        found="that is neither a number nor a GPU-... or MIG-... UUID",
        remedy='Write it as CUDA_VISIBLE_DEVICES is written: "0,2", a UUID, or "-1" for no GPU',
    )


def _remedy(inventory: Inventory) -> str:
    if not inventory.gpus:
        return 'Leave visible_devices out, or give "-1", to run on the CPU'
    return "Name some of " + ", ".join(str(gpu.index) for gpu in inventory.gpus)


def environment(visible_devices: str, inventory: Inventory) -> dict[str, str]:
    """Returns the environment variables with which a process sees only these GPUs.

    Raises:
        DeviceError: The value can't be read, or names no card of this machine, as in `resolve`.
    """
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(resolve(visible_devices, inventory)) or "-1",
    }


def shown(environ: Mapping[str, str], inventory: Inventory) -> tuple[str, ...] | None:
    """Returns the ids of the GPUs that CUDA shows a process with this environment, in TensorFlow's order.

    None where that can't be known: several cards, not ordered by PCI bus, and not named by UUID.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    everything = tuple(str(gpu.index) for gpu in inventory.gpus)
    by_uuid = value is not None and all(e.strip().startswith(("GPU-", "MIG-")) for e in value.split(","))
    if len(everything) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and not by_uuid:
        return None
    return everything if value is None else resolve(value, inventory)


def tensorflow_names(environ: Mapping[str, str], inventory: Inventory) -> dict[int, str] | None:
    """Returns what TensorFlow would call each GPU that it sees under an environment: {3: "/GPU:1"}.

    MIG instances have the name of the first that is visible. None where it can't be known: see `shown`.

    Raises:
        DeviceError: CUDA_VISIBLE_DEVICES names no card of this machine.
    """
    visible = shown(environ, inventory)
    if visible is None:
        return None
    owners = {mig: gpu.index for gpu in inventory.gpus for mig in gpu.mig_uuids}
    names: dict[int, str] = {}
    for number, identity in enumerate(visible):
        names.setdefault(owners[identity] if identity in owners else int(identity), f"/GPU:{number}")
    return names


def unused(environ: Mapping[str, str], inventory: Inventory) -> tuple[str, ...]:
    """Returns the ids of unused GPUs among those that CUDA shows under an environment.

    A card is used where a process computes on it, or where a tenth of its memory is taken and nobody is seen.

    Raises:
        DeviceError: All are used; the message says by whom.
    """
    if not inventory.gpus:
        return ()
    _, usage = look()
    used = {str(each.gpu.index): each.users for each in usage if each.users}
    owners = {mig: str(gpu.index) for gpu in inventory.gpus for mig in gpu.mig_uuids}
    value = environ.get("CUDA_VISIBLE_DEVICES")
    every = tuple(str(gpu.index) for gpu in inventory.gpus) if value is None else resolve(value, inventory)
    free = tuple(identity for identity in every if owners.get(identity, identity) not in used)
    if every and not free:
        raise DeviceError(
            asked="visible_devices=free asks for GPUs that nobody uses",
            found="all are used: " + "; ".join(f"GPU {index} by {who}" for index, who in used.items()),
            remedy="Wait, name cards to share with visible_devices=0, or give -1 to train on the CPU",
        )
    return free


def restart(visible_devices: str | None = None) -> None:
    """Restarts this process, with the same id and command, if CUDA's GPU numbers aren't nvidia-smi's.

    Call it first in a program, before TensorFlow is imported. Returns, having done nothing, where
    the environment already says what is asked, and where there is no GPU.

    Args:
        visible_devices: As in `resolve`; None keeps whatever CUDA_VISIBLE_DEVICES says now.
            With "free", cards that are taken in the meantime are left out the second time.

    Raises:
        DeviceError: The value can't be read, or names no card of this machine, as in `resolve`.
    """
    inventory = take()
    if visible_devices is None:
        if len(inventory.gpus) < 2:
            return
        wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    else:
        wanted = environment(visible_devices, inventory)
        if not inventory.gpus:
            return
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    sys.stdout.flush()
    sys.stderr.write("Starting again with " + " ".join(f"{k}={v}" for k, v in wanted.items()) + "\n")
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


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
    place = place_on_host(environ)
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
