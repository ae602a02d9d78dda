"""How far two tensors are apart, and how far rounding alone may bring them.

The distance is the largest difference between two elements. What one device differs by from itself, when a rounding has
moved its weights, inputs and gradients, says how far that may be: a few times as far, and a few roundings of the
tensor's own largest element. Nobody chooses a number such as 1e-5.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.check.plain import eps_of
from toolkit.strategies.check.state import Of

TIMES = 8.0  # As often what a rounding of everything changes: sums in another order round elsewhere.
_ROUNDINGS = 16.0  # And as many roundings of a tensor's largest element, as where nothing of it was moved.


class Compared(NamedTuple):
    """A tensor of a step, as replicas and as one device have computed it.

    Attributes:
        name: What it is.
        of: What it belongs to.
        dtype: Its name.
        apart: The largest difference of two elements; infinite where shapes differ.
        allowed: How far rounding may bring them apart.
        ours: The largest element of replicas', without its sign; its shape in words where shapes differ.
        one: The same of one device's.
    """

    name: str
    of: Of
    dtype: str
    apart: float
    allowed: float
    ours: Any
    one: Any

    @property
    def differs(self) -> bool:
        """Whether the tensors are further apart than rounding may bring them."""
        return not self.apart <= self.allowed

    def describe(self) -> str:
        """Returns how far they are apart, in words."""
        if isinstance(self.ours, str):
            return f"{self.name} is {self.ours} on replicas and {self.one} on one device"
        values = f"at most {self.ours:.6g} on replicas and {self.one:.6g} on one device"
        may = f"rounding explains {self.allowed:.1e}" if self.allowed else "they should be equal"
        return f"{self.name} differs by {self.apart:.3g}: {values}, and {may}"


def compare(
    name: str,
    of: Of,
    ours: np.ndarray,
    one: np.ndarray,
    moved: Sequence[np.ndarray],
    eps: float,
    far: Sequence[np.ndarray] = (),
) -> Compared:
    """Compares a tensor of replicas' with one device's.

    Args:
        name: What it is.
        of: What it belongs to.
        ours: Replicas'.
        one: One device's, of any shape and dtype.
        moved: What that becomes when a rounding has moved what it is computed from.
        eps: A rounding of the dtype in which the model computes.
        far: What it becomes when a few roundings have: squares of what is nothing but rounding grow by more than these.
    """
    ours, one = np.asarray(ours), np.asarray(one)
    dtype = tf.as_dtype(one.dtype) if one.dtype != object else tf.string
    if ours.shape != one.shape or ours.dtype.kind != one.dtype.kind:
        return Compared(name, of, dtype.name, np.inf, 0.0, _shape(ours), _shape(one))
    if not (dtype.is_floating or dtype.is_complex):
        apart = float(np.sum(ours != one))
        largest = [0.0 if dtype == tf.string else _largest(each.astype(np.float64)) for each in (ours, one)]
        return Compared(name, of, dtype.name, apart, 0.0, *largest)
    exact = np.complex128 if dtype.is_complex else np.float64
    ours, one = ours.astype(exact), one.astype(exact)
    allowed, further = (max([_apart(x.astype(exact), one) for x in every], default=0.0) for every in (moved, far))
    own = eps_of(dtype.real_dtype)
    allowed = max(TIMES * allowed, further) + _ROUNDINGS * max(eps, own) * _largest(one)
    return Compared(name, of, dtype.name, _apart(ours, one), allowed, _largest(ours), _largest(one))


def leaves_of(logs: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the values that a step returns, with their names."""
    for path, leaf in keras.tree.flatten_with_path(logs):
        yield ".".join(map(str, path)) or "of the step", leaf


def _shape(x: np.ndarray) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the largest difference; what is no number, or infinite, must be so in both."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        found = np.where(same, 0.0, np.abs(x - y))
    return float(np.max(np.where(np.isnan(found), np.inf, found), initial=0.0))
