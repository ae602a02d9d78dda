"""The columns of history.csv that a run adds to Keras's logs."""

_OWN = ("epoch", "step", "learning_rate", "examples_per_second", "seconds")
MEMORY = "peak_memory_mb"  # With several GPUs peak_memory_mb_0, peak_memory_mb_1 ...


def is_own(column: str) -> bool:
    """Returns whether a column is none of Keras's logs."""
    return column in _OWN or column.startswith(MEMORY)
