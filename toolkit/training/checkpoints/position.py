"""A position in training."""

import dataclasses

__all__ = ["Position"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position after `step` steps in all: `epoch` whole epochs, and `batch` steps of the next one."""

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def already_did(self, epoch: int, batch: int) -> bool:
        """Returns whether step `batch` (from 0) of epoch `epoch` lies before this position."""
        return (epoch, batch) < (self.epoch, self.batch)
