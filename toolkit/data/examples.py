"""Arrays of pictures and labels, with the names of the classes."""

import dataclasses
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Examples"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """A data set held in memory.

    Attributes:
        name: The data set's name.
        origin: Where it came from, in words.
        classes: Names of the classes; a label is an index into them.
        train_images: uint8 [N, 32, 32, 3].
        train_labels: int32 [N].
        test_images: uint8 [M, 32, 32, 3].
        test_labels: int32 [M].
    """

    name: str
    origin: str
    classes: tuple[str, ...]
    train_images: "np.ndarray"
    train_labels: "np.ndarray"
    test_images: "np.ndarray"
    test_labels: "np.ndarray"

    def fingerprint(self) -> str:
        """Returns 16 hex digits that differ if the training examples or their order differ."""
        digest = hashlib.sha256(self.train_labels.tobytes())
        digest.update(self.train_images[:: max(1, len(self.train_images) // 256)].tobytes())
        return digest.hexdigest()[:16]
