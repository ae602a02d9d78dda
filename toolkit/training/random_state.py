"""The global random generators of Python, NumPy and TensorFlow: what a user's data or callbacks may draw from."""

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["random_state", "restore_random"]


def random_state() -> dict[str, Any]:
    """Returns the state of Python's, NumPy's and TensorFlow's global random generators, as JSON can hold it."""
    version, words, spare = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), spare],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }
    import tensorflow as tf

    if not tf.distribute.has_strategy():  # In a strategy's scope TensorFlow would make a distributed variable of it.
        with contextlib.suppress(RuntimeError):  # Under enable_op_determinism nothing draws from one that isn't set.
            state["tensorflow"] = tf.random.get_global_generator().state.numpy().tolist()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Sets what `random_state` has returned."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    numpy = state["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], np.uint32)}})
    import tensorflow as tf

    if "tensorflow" in state and not tf.distribute.has_strategy():
        tf.random.get_global_generator().state.assign(state["tensorflow"])
