"""A run's state in Python: counters of callbacks, such as EarlyStopping's patience, and random generators."""

import contextlib
import inspect
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

__all__ = ["CallbackState", "random_state", "restore_random"]

_LOG = logging.getLogger(__name__)
_PREFIX = "callbacks/"
_KERAS_OWN = ("_model", "model", "params", "validation_data")
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray)


class CallbackState:
    """Saves and restores callbacks' attributes that are plain values, arrays, or lists and dicts of them.

    Only what has changed since training began counts: what a constructor was given is the user's, and may differ
    when a run is resumed. What a callback holds besides (functions, files, models) was given to it, or is made
    again when training begins. An attribute that changes during training and is none of these can't be saved: the
    callback is then named, once.

    Args:
        callbacks: The user's own. Of several of one class, their order must be that of the run that is resumed.
    """

    def __init__(self, callbacks: "Sequence[keras.callbacks.Callback]") -> None:
        self._callbacks = list(callbacks)
        self._others: dict[tuple[int, str], Any] = {}
        self._at_first: dict[tuple[int, str], Any] = {}
        self._named: set[int] = set()

    def begin(self) -> None:
        """Records the attributes when training begins; call it after `on_train_begin`."""
        for number, callback in enumerate(self._callbacks):
            for name, value in _attributes(callback).items():
                if _storable(value):
                    self._at_first[number, name] = _frozen(value)
                else:
                    self._others[number, name] = value

    def capture(self) -> "tuple[list[dict], dict[str, np.ndarray]]":
        """Returns the attributes as JSON values, and their arrays by name."""
        arrays: dict[str, np.ndarray] = {}
        plain = []
        for number, callback in enumerate(self._callbacks):
            kept = {}
            for name, value in _attributes(callback).items():
                if _storable(value):
                    if _frozen(value) == self._at_first.get((number, name)):
                        continue
                    kept[name] = _packed(value, f"{_PREFIX}{number:04d}/{name}", arrays)
                elif self._changes(number, name, value) and not _is_keras_own(callback) and number not in self._named:
                    self._named.add(number)
                    _LOG.warning(
                        "%s keeps %s in %s, which can't be saved: a resumed run starts that attribute again",
                        type(callback).__name__,
                        type(value).__name__,
                        name,
                    )
            plain.append({"class": type(callback).__name__, "attributes": kept})
        return plain, arrays

    def restore(self, plain: Sequence[Mapping[str, Any]], arrays: "Mapping[str, np.ndarray]") -> None:
        """Sets what `capture` has returned.

        The first callback of a class gets the values of the first one, and so on.
        """
        saved = [(kept["class"], kept["attributes"]) for kept in plain]
        left = list(saved)
        for callback in self._callbacks:
            found = next((each for each in left if each[0] == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                for name, value in found[1].items():
                    setattr(callback, name, _unpacked(value, arrays))
        mine, theirs = [type(callback).__name__ for callback in self._callbacks], [name for name, _ in saved]
        if sorted(mine) != sorted(theirs):
            _LOG.warning(
                "The run began with the callbacks %s and resumes with %s: new ones start without counters",
                ", ".join(theirs) or "none",
                ", ".join(mine) or "none",
            )

    @property
    def have_ended_it(self) -> bool:
        """Whether an EarlyStopping has stopped the training, which is then complete.

        Other callbacks may only pause it.
        """
        import keras

        return any(
            isinstance(each, keras.callbacks.EarlyStopping) and each.stopped_epoch > 0 for each in self._callbacks
        )

    def _changes(self, number: int, name: str, value: Any) -> bool:
        if callable(value):
            return False
        before = self._others.get((number, name))
        return before is not value or (isinstance(value, _CONTAINERS) and bool(value))


def _is_keras_own(callback: "keras.callbacks.Callback") -> bool:
    """Whether it recreates what can't be saved, such as CSVLogger's writer."""
    return type(callback).__module__.startswith("keras.")


def _attributes(callback: "keras.callbacks.Callback") -> dict[str, Any]:
    own: Iterable[str] = _KERAS_OWN
    if _is_keras_own(callback):
        # Arguments. EarlyStopping changes the sign of one (min_delta) at its first comparison in each process.
        own = (*own, *inspect.signature(type(callback).__init__).parameters)
    return {name: value for name, value in vars(callback).items() if name not in own}


def _storable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    if isinstance(value, (list, tuple)):
        return all(_storable(each) for each in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _storable(each) for name, each in value.items())
    return isinstance(value, (*_PLAIN, np.generic))


def _frozen(value: Any) -> Any:
    """Returns a copy that can be compared later."""
    arrays: dict[str, np.ndarray] = {}
    plain = _packed(value, "", arrays)
    return repr(plain), {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}


def _packed(value: Any, path: str, arrays: "dict[str, np.ndarray]") -> Any:
    """Returns a JSON value, each part as {kind: ...}, so that tuples, NaN and arrays are restored exactly."""
    if isinstance(value, (np.ndarray, np.generic)):
        arrays[path] = np.array(value)  # A copy, which is written while training goes on.
        return {"scalar" if isinstance(value, np.generic) else "array": path}
    if isinstance(value, (list, tuple)):
        members = [_packed(each, f"{path}/{number}", arrays) for number, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": members}
    if isinstance(value, dict):
        return {"dict": {name: _packed(each, f"{path}/{name}", arrays) for name, each in value.items()}}
    return {"float": repr(value)} if isinstance(value, float) else {"plain": value}


def _unpacked(packed: Mapping[str, Any], arrays: "Mapping[str, np.ndarray]") -> Any:
    (kind, value), *_ = packed.items()
    if kind in ("array", "scalar"):
        return arrays[value].copy() if kind == "array" else arrays[value][()]
    if kind in ("list", "tuple"):
        members = [_unpacked(each, arrays) for each in value]
        return tuple(members) if kind == "tuple" else members
    if kind == "dict":
        return {name: _unpacked(each, arrays) for name, each in value.items()}
    return float(value) if kind == "float" else value


def random_state() -> dict[str, Any]:
    """Returns the state of Python's, NumPy's and TensorFlow's global random generators as JSON values."""
    version, words, spare = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), spare],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }
    import tensorflow as tf

    if not tf.distribute.has_strategy():  # In a strategy's scope, TensorFlow would create a distributed variable.
        with contextlib.suppress(RuntimeError):  # With enable_op_determinism, a generator that isn't set can't be used.
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
