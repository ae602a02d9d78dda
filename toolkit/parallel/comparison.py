"""A way to divide layers: what was predicted for it, and what was measured."""

import dataclasses
from typing import Any

__all__ = ["Row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way, of a training step.

    Attributes:
        conv: How convolutions were divided: "replicated", "sharded" or "planned".
        fc: How FC layers were.
        predicted_seconds: Of a step.
        measured_seconds: Of a step; None where none was.
        predicted_bytes: That a replica receives in a step.
        measured_bytes: The same; None where replicas share a process.
        parameters: Trained numbers that a replica holds.
        loss: The last epoch's.
    """

    conv: str
    fc: str
    predicted_seconds: float
    measured_seconds: float | None
    predicted_bytes: float
    measured_bytes: float | None
    parameters: int
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return dataclasses.asdict(self)
