"""Configures TensorFlow's devices before it starts: the options, checked first, what is done, and what came of it."""

import dataclasses
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from toolkit.devices import inventory as _inventory
from toolkit.devices.inventory import Gpu, Inventory, own_gpus, resolve, shown
from toolkit.errors import DeviceError

if TYPE_CHECKING:
    from rich.table import Table

EMULATE = ("auto", "never", "always")
MOST_EMULATED = 64  # More replicas on one CPU serve no purpose, so it must be a mistake.
_SMALLEST_MIB = 64  # With less, not even a CUDA library's workspace fits, so it must be a mistake.
_LARGEST_MIB = 2**30  # A pebibyte.
_REMEDY = (
    'Give "growth" (take it as it is needed), a fraction of the card such as 0.4, a limit in MiB such as 4096, or "all"'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """One of the four settings, the same for every GPU.

    Attributes:
        growth: Take memory as it is needed.
        fraction: Share of the card's total, in (0, 1]; None if not given so.
        limit_mib: Limit in MiB; None if not given so.
    """

    growth: bool = False
    fraction: float | None = None
    limit_mib: int | None = None

    @classmethod
    def parse(cls, value: "str | float | int | Memory") -> "Memory":
        """Parses "growth", "all", a fraction ("0.4" or 0.4) or a limit in MiB ("4096" or 4096).

        Raises:
            DeviceError: It is none of these, or two at once.
        """
        if isinstance(value, Memory):
            return value
        text = str(value).strip().lower()
        asked = f"memory={value!r} says how much of each GPU to take"
        if text == "growth":
            return cls(growth=True)
        if text == "all":
            return cls()
        if "growth" in text:
            raise DeviceError(
                asked=asked,
                found="TensorFlow can't combine growth with a limit",
                remedy="Choose one: memory=growth, or a fraction or limit alone",
            )
        number = re.fullmatch(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(?:\s*mib)?", text)
        if number is None:
            raise DeviceError(asked=asked, found="that isn't an amount of memory", remedy=_REMEDY)
        amount = float(number.group(1))
        if "." in number.group(1) and not text.endswith("mib"):
            if not 0 < amount <= 1:
                raise DeviceError(
                    asked=asked,
                    found="a number with a decimal point is a fraction, above 0 and at most 1.0",
                    remedy=_REMEDY,
                )
            return cls(fraction=amount)
        if amount < _SMALLEST_MIB:
            raise DeviceError(
                asked=asked,
                found=f"a whole number is a limit in MiB, which must be at least {_SMALLEST_MIB}",
                remedy=_REMEDY,
            )
        if amount > _LARGEST_MIB:
            raise DeviceError(
                asked=asked, found=f"a whole number is a limit in MiB, at most {_LARGEST_MIB}", remedy=_REMEDY
            )
        return cls(limit_mib=int(amount))

    def per_logical_device(self, total_mib: int | None, split: int) -> int | None:
        """Returns the limit in MiB of each of `split` logical devices on a card of `total_mib`.

        None means no limit. A limit given in MiB is each logical device's own; a fraction is the
        card's, shared among them; "all" split several ways keeps a tenth back for CUDA itself.

        Raises:
            DeviceError: The card's total is needed and not known, or the limits exceed it.
        """
        if split == 1 and self.fraction is None and self.limit_mib is None:
            return None
        if self.limit_mib is not None:
            if total_mib is not None and self.limit_mib * split > total_mib:
                raise DeviceError(
                    asked=f"memory={self.limit_mib} with split={split} takes {self.limit_mib * split} MiB of a GPU",
                    found=f"the GPU has {total_mib} MiB",
                    remedy=f"Ask for at most {total_mib // split} MiB each",
                )
            return self.limit_mib
        if total_mib is None:
            raise DeviceError(
                asked=f"memory={self} is a share of the card",
                found="NVML doesn't say how much memory the card has",
                remedy="Give a limit in MiB instead",
            )
        fraction = 0.9 if self.fraction is None else self.fraction
        return int(total_mib * fraction) // split

    def __str__(self) -> str:
        if self.growth:
            return "growth"
        if self.fraction is not None:
            return str(self.fraction)
        return "all" if self.limit_mib is None else f"{self.limit_mib} MiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """The arguments of `toolkit.devices.configure`, where they are explained.

    Raises:
        DeviceError: A value is out of its range, or two exclude each other.
    """

    gpus: int | None = None
    visible_devices: str | None = None
    emulate: str = "auto"
    memory: Memory | str | float | int = "growth"
    split: int = 1
    inter_op_threads: int = 0
    intra_op_threads: int = 0
    soft_placement: bool = True
    log_placement: bool = False

    def __post_init__(self) -> None:
        if self.gpus is not None:
            _check_number(
                "gpus", self.gpus, 1, "asks for that many replicas", "Ask for 1 or more, or leave it out for all"
            )
        _check_number("split", self.split, 1, "divides each GPU into that many logical devices", "Give 1 or more")
        for name in ("inter_op_threads", "intra_op_threads"):
            _check_number(
                name, getattr(self, name), 0, "sets a number of threads", "Give 1 or more, or 0 for TensorFlow's choice"
            )
        DeviceError.check_choice(
            self.emulate, EMULATE, asked=f"emulate={self.emulate!r} says when CPU devices stand in for GPUs"
        )
        object.__setattr__(self, "memory", Memory.parse(self.memory))
        if self.split > 1 and self.amount.growth:
            raise DeviceError(
                asked=f"split={self.split} with memory=growth",
                found="TensorFlow gives logical devices of one GPU fixed shares of its memory",
                remedy="Give memory=all, a fraction, or a limit in MiB",
            )

    @property
    def amount(self) -> Memory:
        """The parsed `memory`."""
        return Memory.parse(self.memory)


def _check_number(name: str, value: object, least: int, meaning: str, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DeviceError(asked=f"{name}={value!r} {meaning}", found="that isn't a whole number", remedy=remedy)
    if value < least:
        raise DeviceError(asked=f"{name}={value} {meaning}", found=f"it must be at least {least}", remedy=remedy)


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
_kept = False  # Whether what was configured stays, whatever a script asks for.


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
        if _kept or _done[0] == request:
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


def configure_for_script(**arguments: Any) -> Setup:
    """Configures the devices for a script that is about to run: what it asks of `configure` then changes nothing.

    Args:
        **arguments: As of `configure`, which says what is returned and raised.
    """
    global _kept
    setup = configure(**arguments)
    _kept = True
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


def cards_of(devices: Iterable[str]) -> tuple[Gpu, ...]:
    """Returns the cards of some of TensorFlow's logical devices; all of the machine's if they can't be told apart.

    Args:
        devices: Their names, such as "/job:localhost/replica:0/task:0/device:GPU:0". CPUs have no card.
    """
    import tensorflow as tf

    specs = [tf.DeviceSpec.from_string(each) for each in devices]
    numbers = [each.device_index for each in specs if each.device_type == "GPU"]
    if not numbers:
        return ()
    inventory, physical = _inventory.take(), tf.config.list_physical_devices("GPU")
    try:
        card_ids = shown(os.environ, inventory)
    except DeviceError:
        card_ids = None
    if card_ids is None or len(card_ids) != len(physical):  # TensorFlow leaves out cards that are too old or too slow.
        return inventory.gpus
    cards = _cards(physical, card_ids, inventory)
    logical = [
        cards.get(device.name)
        for device in tf.config.get_visible_devices("GPU")
        for _ in tf.config.get_logical_device_configuration(device) or (None,)
    ]
    found = [logical[number] if number < len(logical) else None for number in numbers]
    return tuple(each for each in dict.fromkeys(found) if each is not None) if None not in found else inventory.gpus


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
