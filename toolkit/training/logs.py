"""Keras's logs as single numbers, with the same names wherever a run writes or shows them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["in_words", "scalars"]


def scalars(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns logs as single numbers: a vector metric such as F1Score becomes name_0, name_1 ..."""
    found = {}
    for name, value in (logs or {}).items():
        array = np.asarray(value)
        if array.ndim == 0:
            found[name] = float(array)
        else:
            found.update({f"{name}_{place}": float(each) for place, each in enumerate(array.ravel())})
    return found


def in_words(logs: Mapping[str, Any] | None) -> str:
    """Returns logs as text for the screen or a log file: "loss 0.1234, accuracy 0.9876"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in scalars(logs).items())
