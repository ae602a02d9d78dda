"""The options for devices, checked before TensorFlow is touched."""

import dataclasses

from toolkit.devices.memory import Memory
from toolkit.errors import DeviceError

__all__ = ["EMULATE", "MOST_EMULATED", "DeviceRequest"]

EMULATE = ("auto", "never", "always")
MOST_EMULATED = 64  # More replicas on one CPU serve no purpose, so it must be a mistake.


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
