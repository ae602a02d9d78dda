"""Arrays by name that are made when they are read: a checkpoint is written and restored with one in memory at a time.

What replicas keep in shards, and what lies in a file, is needed whole for only as long as it takes to write it, or to
cut it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Later:
    """An array that is made when it is read. Nobody keeps it.

    Attributes:
        shape: Of the array.
        dtype: Of the array.
        read: Returns it.
        own: What this process has of it in memory.
        together: Whether all processes must read it, in the same order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    own: tuple[np.ndarray, ...] = ()
    together: bool = False

    @classmethod
    def of(cls, array: np.ndarray) -> "Later":
        """Returns one that is there already."""
        return cls(shape=array.shape, dtype=array.dtype, read=lambda: array, own=(array,))

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class Arrays(Mapping[str, np.ndarray]):
    """A mapping of names to arrays, each of which is made again wherever it is read.

    Its order depends on names and dtypes alone, so that processes that read it together read the same one.

    Args:
        later: The arrays by name.

    Attributes:
        later: The same, in that order.
    """

    def __init__(self, later: Mapping[str, Later]) -> None:
        # The largest elements first, so that each begins in a file at a multiple of its elements' size.
        self.later = dict(sorted(later.items(), key=lambda each: (-each[1].dtype.itemsize, each[0])))

    @classmethod
    def joined(cls, *several: Mapping[str, np.ndarray]) -> "Arrays":
        """Returns the arrays of several mappings as one. Reads none of them."""
        found: dict[str, Later] = {}
        for each in several:
            made = each.later if isinstance(each, Arrays) else {name: Later.of(array) for name, array in each.items()}
            found.update(made)
        return cls(found)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.later[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self.later

    def __iter__(self) -> Iterator[str]:
        return iter(self.later)

    def __len__(self) -> int:
        return len(self.later)


def dtype_named(name: str) -> np.dtype:
    """Returns a dtype of NumPy's, or one of TensorFlow's that NumPy doesn't have, such as bfloat16."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def raw(array: np.ndarray) -> Any:
    """Returns an array's bytes without a copy, unless it lies scattered."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
