"""Formats figures: single numbers, or columns of numbers with the same number of decimals."""

import math
from collections.abc import Sequence
from typing import Any

from toolkit.observe.report.reading import RunData

__all__ = ["EARLIER_NAMES", "column", "in_words", "is_share", "value_of"]

# Where summaries of earlier versions have them.
EARLIER_NAMES = {
    "loss": "train_loss",
    "accuracy": "train_accuracy",
    "val_loss": "test_loss",
    "val_accuracy": "test_accuracy",
}
_DIGITS = 4


def value_of(run: RunData, key: str) -> Any:
    """Returns a value of a run's summary; for a run that hasn't ended, a metric of its last epoch."""
    last = run.history[-1].get(key) if run.history and key in run.metrics else None
    return run.summary.get(key, run.summary.get(EARLIER_NAMES.get(key, ""), last))


def in_words(key: str, value: Any) -> str:
    """Formats a value: "" for None, "98.70%" for an accuracy, four digits for another fraction."""
    try:
        return _in_words(key, value)
    except (OverflowError, ValueError):  # A number of four hundred digits.
        return "?"


def _in_words(key: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    if is_share(key) and isinstance(value, (int, float)):
        return f"{value:.2%}"
    if key == "weights_sha256":
        return str(value)[:16]
    if isinstance(value, float):
        return f"{value:,.{_DIGITS}g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def is_share(key: str) -> bool:
    """Whether a metric is shown in per cent."""
    return key.endswith("accuracy")


def column(key: str, values: Sequence[Any]) -> list[str]:
    """Formats the values of a column with the same number of decimals: enough for four digits of the largest."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if is_share(key) or len(numbers) < len([value for value in values if value is not None]):
        return [in_words(key, value) for value in values]
    if all(float(number).is_integer() for number in numbers):
        return [in_words(key, value if value is None else int(value)) for value in values]
    largest = max(map(abs, numbers))
    if largest < 1e-3:
        return [in_words(key, value) for value in values]
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(largest)))
    return ["" if value is None else f"{value:,.{decimals}f}" for value in values]
