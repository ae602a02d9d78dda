"""The options for devices, checked before TensorFlow is touched: how much of a GPU's memory it takes, among others."""

import dataclasses
import re

from toolkit.errors import DeviceError

__all__ = ["EMULATE", "MOST_EMULATED", "DeviceRequest", "Memory"]

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
