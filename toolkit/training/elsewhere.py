"""What a worker that isn't chief has in place of a run directory and its checkpoints: nothing."""

from collections.abc import Mapping
from typing import Any

from toolkit.training.checkpoints import Checkpoint

__all__ = ["DirectoryElsewhere", "NoCheckpoints"]


class DirectoryElsewhere:
    """Stands for the chief's run directory, which may be on another host: only the chief touches it."""

    path = "the chief's run directory"

    def settle(self, config: Mapping[str, Any]) -> None:
        """Leaves the record, and the comparison with it, to the chief."""

    def check_space(self, checkpoint_bytes: int) -> None:
        """Leaves the disk to the chief."""

    def close(self) -> None:
        """There is nothing to close."""


class NoCheckpoints:
    """Stands for the chief's checkpoints."""

    directory = "the chief's run directory"

    def save(self, checkpoint: Checkpoint, *, end_of_epoch: bool) -> None:
        """Leaves writing to the chief."""
