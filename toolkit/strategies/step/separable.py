"""Tests once whether a loss or a metric of a batch follows from those of the batch's parts.

Each replica has a part of a batch. A mean over examples is the weighted mean of the parts' means, and a sum is the sum
of their sums; a Dice loss, a mean over what a mask leaves, or a running maximum is neither. Which of these a function
is shows in what it returns for made-up examples and for two uneven parts of them. Some of the labels are what scripts
take for "no label" (0, -1, 255, not a number), unevenly, because a mask shows only where something is masked.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.support.scopes import outside

__all__ = ["Kind", "loss_kind", "metric_kind"]

_ROWS, _FIRST = 7, 3  # The number of examples, and how many of them are in the first part.
_MASKED = [0, 2, 5]  # Examples with invalid labels: two of the first part, and one of the second.
_MISSING = (0, -1, -100, 255, 999, float("nan"))
_UNKNOWN = 8  # Stands for an unknown dimension.
_LARGE = 1 << 20  # Above this many elements, fewer draws are tried.
_WRAPPERS = ("LossFunctionWrapper", "MeanMetricWrapper")  # Of a function, which may be the user's.
# Keras's losses in which an example's value depends on others. (Functions have the same names in snake case.)
_COUPLED = ("Circle", "Dice", "Tversky", "PearsonCorrelation", "ConcordanceCorrelation")


class Kind(enum.Enum):
    """How a value of a batch follows from those of its parts."""

    EXAMPLES = "a mean over examples, or a value for each; a metric's state that is a sum over them"
    MEAN = "a metric's state that is a mean of batches' means over their examples"
    SUM = "a sum over examples; a metric's state that is a sum over batches"
    WHOLE = "neither"


def loss_kind(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Kind:
    """Returns a loss's kind before weighting and reduction.

    Args:
        loss: Any.
        y_true: Tensors of the shapes and dtypes of labels, in any structure; their values don't matter.
        y_pred: The same of predictions.
    """
    if _is_known(loss.fn) if type(loss).__name__ == "LossFunctionWrapper" else _is_keras_own(loss):
        return Kind.EXAMPLES

    def converted(*given: Any) -> Any:  # As `Loss.__call__` passes them.
        return loss.call(*keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, loss.dtype), given))

    return outside(lambda: _loss_kind(converted, (y_true, y_pred)))


def metric_kind(metric: keras.Metric, args: Sequence, kwargs: dict) -> Kind:
    """Returns the kind of a metric's state.

    Args:
        metric: Any; its state stays as it is.
        args: What its `update_state` is given: tensors of whose values nothing is asked.
        kwargs: The same, by name.
    """
    function = getattr(metric, "_fn", None)
    if _is_keras_own(metric) or (isinstance(metric, keras.metrics.MeanMetricWrapper) and _is_known(function)):
        return Kind.EXAMPLES
    if any(isinstance(each, tf.Variable) for each in vars(metric).values()):
        return Kind.WHOLE  # An update of those can't be tried.
    return outside(lambda: _metric_kind(metric, args, kwargs))


def _loss_kind(function: Callable, given: Any) -> Kind:
    kinds: set[Kind] = set()
    with keras.StatelessScope():
        for draw in _draws(given):
            try:
                results = [np.asarray(function(*part), np.float64) for part in _parts(draw)]
            except Exception:  # A user's own code may not accept such labels.
                continue
            if np.isfinite(results[0]).all():
                kinds |= _compared(*results)
    return next(iter(kinds)) if len(kinds) == 1 else Kind.WHOLE


def _compared(whole: np.ndarray, first: np.ndarray, second: np.ndarray) -> set[Kind]:
    """Returns the kind, and none if nothing is known."""
    if whole.ndim:
        whole_shape = (len(first) + len(second), *first.shape[1:]) if first.ndim and second.ndim else None
        alike = whole.shape == whole_shape and len(first) * _ROWS == len(whole) * _FIRST
        return {Kind.EXAMPLES if alike and _close(np.concatenate([first, second]), whole) else Kind.WHOLE}
    if not whole and not first and not second:
        return set()
    if _close((_FIRST * first + (_ROWS - _FIRST) * second) / _ROWS, whole):
        return {Kind.EXAMPLES}
    return {Kind.SUM if _close(first + second, whole) else Kind.WHOLE}


def _metric_kind(metric: Any, args: Sequence, kwargs: dict) -> Kind:
    start = [np.asarray(keras.ops.convert_to_numpy(each), np.float64) for each in metric.stateless_reset_state()]
    if any(each.any() for each in start):  # Replicas' states begin with it, and their sum with a multiple.
        return Kind.WHOLE

    def updated(state: Sequence, part: Any) -> list[np.ndarray]:
        given = [tf.cast(value, v.dtype) for value, v in zip(state, metric.variables, strict=True)]
        after = metric.stateless_update_state(given, *part[0], **part[1])
        return [np.asarray(keras.ops.convert_to_numpy(each), np.float64) for each in after]

    tried, adds, divides = False, True, True
    for draw in _draws((tuple(args), kwargs)):
        try:
            whole, first, second = (updated(start, part) for part in _parts(draw))
            after_first = updated(first, list(_parts(draw))[2])
        except Exception:  # As for losses.
            continue
        if not all(np.isfinite(each).all() for each in whole):
            continue
        tried = True
        sums = [one + two for one, two in zip(first, second, strict=True)]
        adds = adds and _all_close(after_first, sums)
        divides = divides and _all_close(whole, sums)
    if not tried or not adds:
        return Kind.WHOLE
    if divides:
        return Kind.EXAMPLES
    return Kind.MEAN if _is_mean_of_means(metric, args, kwargs) else Kind.SUM


def _is_mean_of_means(metric: Any, args: Sequence, kwargs: dict) -> bool:
    """Whether a metric is a mean of batches' means over examples, which replicas' shares can weight."""
    given = [each for each in (*args, *kwargs.values()) if each is not None]
    if not isinstance(metric, keras.metrics.MeanMetricWrapper) or len(given) > 2:  # With weights.
        return False
    return _loss_kind(lambda *pair: metric._fn(*pair, **metric._fn_kwargs), tuple(given)) is Kind.EXAMPLES


def _all_close(ones: Sequence[np.ndarray], twos: Sequence[np.ndarray]) -> bool:
    return all(one.shape == two.shape and _close(one, two) for one, two in zip(ones, twos, strict=True))


def _close(one: np.ndarray, two: np.ndarray) -> bool:
    scale = max(np.abs(one).max(initial=0), np.abs(two).max(initial=0))
    return bool(np.allclose(one, two, rtol=1e-4, atol=1e-5 * scale, equal_nan=False))


def _is_known(function: Any) -> bool:
    """Whether it is a Keras function with a value for each example."""
    name = getattr(function, "__name__", "").replace("_", "")
    coupled = [each.lower() for each in _COUPLED]
    return getattr(function, "__module__", "").startswith("keras.src.") and name not in coupled


def _is_keras_own(thing: Any) -> bool:
    return type(thing).__module__.startswith("keras.src.") and type(thing).__name__ not in _COUPLED + _WRAPPERS


# Generated examples.


def _parts(draw: Any) -> Iterator[Any]:
    """Yields all examples, those of the first part and those of the second."""
    for rows in (slice(None), slice(None, _FIRST), slice(_FIRST, None)):
        yield keras.tree.map_structure(
            lambda each, rows=rows: tf.constant(each[rows]) if isinstance(each, np.ndarray) else each, draw
        )


def _draws(given: Any) -> Iterator[Any]:
    """Yields structures like the given one, with examples in place of tensors; the first of them are labels."""
    flat = keras.tree.flatten(given)
    shapes = {
        number: (_ROWS, *(size or _UNKNOWN for size in each.shape[1:]))
        for number, each in enumerate(flat)
        if tf.is_tensor(each) and each.shape.rank
    }
    if not shapes:
        return
    large = sum(np.prod(shape) for shape in shapes.values()) > _LARGE
    for seed, missing in enumerate((None, *_MISSING[: 2 if large else None])):
        random = np.random.default_rng(seed)
        arrays: list[Any] = list(flat)
        for number, shape in shapes.items():
            dtype = tf.as_dtype(flat[number].dtype)
            if dtype.is_floating:
                array = random.uniform(0.05, 0.95, shape).astype(dtype.as_numpy_dtype)
            else:
                array = random.integers(0, 2, shape).astype(dtype.as_numpy_dtype)
            arrays[number] = array
        labels = arrays[min(shapes)]
        if missing is not None:
            if labels.dtype.kind not in "fiV" and not 0 <= missing <= np.iinfo(np.uint8).max:
                continue
            if missing != missing and labels.dtype.kind in "biu":  # noqa: PLR0124 - Not a number.
                continue
            labels[_MASKED] = missing
        yield keras.tree.pack_sequence_as(given, arrays)
