"""What a checkpoint holds of a run, as arrays and JSON values, and how it is set again.

Of the model its weights, optimizers, random seeds and running metrics; of the process the counters of callbacks, such
as EarlyStopping's patience, and random generators; Keras's for calls without a seed goes on where it was.
"""

import contextlib
import hashlib
import inspect
import logging
import math
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import strategies
from toolkit.errors import CheckpointError
from toolkit.training.arrays import Arrays, Later, raw

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _METRICS = "model/", "optimizer/", "metrics/"
_OTHERS = "others/"  # TensorFlow variables among a model's attributes.
_EXCHANGE = "exchange/"  # Variables that differ by replica: for compression, accumulation, local steps, and statistics.
_STATISTICS = "exchange/statistics/"
_TRAINS = "trains/"  # By an optimizer's number, the numbers of the model's variables for which it was built.


def capture(model: "keras.Model") -> Arrays:
    """Returns every variable of the model and its optimizers, by a name that gives owner and place.

    A variable that is mirrored on several devices is read once. What replicas keep in shards is put together when it is
    read; where replicas are several processes, all must read it together, before the next step.
    """
    return _captured(model, without=frozenset())


def common(model: "keras.Model") -> Arrays:
    """Returns what `capture` returns, without variables of which each replica has its own.

    They are in there a second time, of all replicas.
    """
    from toolkit.strategies.step import exchanges

    own = {id(each) for each in exchanges.own_variables(model)} if _may_differ(model) else set()
    return _captured(model, without=own)


def _captured(model: "keras.Model", *, without: Collection[int]) -> Arrays:
    """Returns every variable by its name, but for those with these ids."""
    strategies.wait_for_steps(model)
    optimizers = _optimizers(model)
    variables = {name: v for name, v in _variables(model, optimizers).items() if id(v) not in without}
    return Arrays.joined(_values(variables), _trained(model, optimizers))


def restore(model: "keras.Model", arrays: Mapping[str, np.ndarray]) -> None:
    """Sets every variable of model and optimizer, on all replicas.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer; nothing was set.
    """
    _assign(model, *_checked(model, Arrays.joined(arrays)))
    if _may_differ(model):
        from toolkit.strategies.step import exchanges

        exchanges.resume(model)


def _checked(model: "keras.Model", arrays: Arrays) -> tuple[dict, dict[str, Later]]:
    """Returns the result of `_matching` after checking that `restore` can set it.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer.
    """
    optimizers = _optimizers(model)
    _build_optimizers(model, optimizers, arrays)
    variables, saved = _matching(model, optimizers, arrays)
    for name in (*variables, *saved):
        mine = tuple(variables[name].shape) if name in variables else None
        theirs = saved[name].shape if name in saved else None
        if mine != theirs:
            raise CheckpointError(
                asked=f"the checkpoint is to be restored into model {model.name!r}",
                found=f"variable {name} has {_shape(theirs)} in the checkpoint and {_shape(mine)} in the model",
                remedy="Resume with the model and optimizer that the run had at this checkpoint, or train again: "
                "remove the run's directory or name another",
            )
    return variables, saved


def without_variables(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that `restore` doesn't set."""
    return {
        name: arrays[name] for name in arrays if not name.startswith((_MODEL, _OPTIMIZER, _OTHERS, _EXCHANGE, _TRAINS))
    }


def digest(model: "keras.Model") -> str:
    """Returns the SHA-256 of the model's variables in hexadecimal; it is equal if they are equal bit for bit."""
    total = hashlib.sha256()
    for variable in model.variables:
        total.update(raw(_value(variable).read()))
    return total.hexdigest()


def chief_reads(model: "keras.Model") -> contextlib.AbstractContextManager:
    """Returns a context in which the chief alone may read the model. All processes must enter it."""
    from toolkit.strategies.step import sharded_variable
    from toolkit.strategies.variables import variables_of

    return sharded_variable.chief_reads(model.distribute_strategy, list(variables_of(model)))


def capture_metrics(model: "keras.Model") -> dict[str, np.ndarray]:
    """Returns the running sums of the metrics, over all replicas."""
    strategies.wait_for_steps(model)
    return dict(_values(_metrics(model)))


def metrics_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that `capture_metrics` had returned."""
    return {name: arrays[name] for name in arrays if name.startswith(_METRICS)}


def restore_metrics(model: "keras.Model", arrays: Mapping[str, np.ndarray]) -> None:
    """Sets the running sums of the metrics that the model still has."""
    variables = _metrics(model)
    _assign(model, variables, {name: Later.of(arrays[name]) for name in arrays if name in variables})


def size_in_bytes(model: "keras.Model") -> int:
    """Returns the size of `capture`'s result."""
    import tensorflow as tf

    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in _variables(model, _optimizers(model)).values())


def _matching(model: "keras.Model", optimizers: list, arrays: Arrays) -> tuple[dict, dict[str, Later]]:
    """Returns the model's variables and the saved arrays, without those of optimizers that had taken no step."""
    variables = _variables(model, optimizers)
    kept = (_MODEL, _OPTIMIZER, _OTHERS, _EXCHANGE)
    saved = {_uncounted(name): each for name, each in arrays.later.items() if name.startswith(kept)}
    for which in range(len(optimizers)) if len(optimizers) > 1 else ():
        if f"{_TRAINS}{which}" not in arrays:
            # Keras builds the optimizer given to `compile`, used or not, if it builds the model itself.
            for names in (variables, saved):
                for name in [name for name in names if name.startswith(_OPTIMIZER) and _owner(name) == which]:
                    del names[name]
    _match_exchange(variables, saved)
    return variables, saved


def _match_exchange(variables: dict, saved: dict) -> None:
    """Leaves out variables that differ by replica if the run continues with other replicas or another exchange."""
    names = {name for name in (*variables, *saved) if name.startswith(_EXCHANGE)}
    statistics = {name for name in names if name.startswith(_STATISTICS)}
    for name in statistics:
        if name in saved and name in variables and saved[name].shape == variables[name].shape:
            continue
        variables.pop(name, None)  # All replicas go on with the first one's.
        saved.pop(name, None)
    names -= statistics
    if any(name not in saved or name not in variables or saved[name].shape != variables[name].shape for name in names):
        _LOG.warning(
            "The run goes on with another number of replicas, or another way to send less: what each replica kept for "
            "itself, such as what hasn't been sent of earlier gradients, is dropped"
        )
        for name in names:
            variables.pop(name, None)
            saved.pop(name, None)


def _variables(model: "keras.Model", optimizers: list) -> dict:
    import tensorflow as tf

    # By number, in the order of construction. Paths contain counters such as the 3 of "conv2d_3" or "sgd_3", which
    # depend on what else the process has built; so does "variable_3", the name of a weight without a given name.
    found = {_uncounted(f"{_MODEL}{number:04d}/{v.name}"): v for number, v in enumerate(model.variables)}
    for which, optimizer in enumerate(optimizers):
        own = f"{which}/" if which else ""
        found.update({f"{_OPTIMIZER}{own}{number:04d}": v for number, v in enumerate(optimizer.variables)})
    if _may_differ(model):
        from toolkit.strategies.step.exchanges import per_replica_state

        found.update({f"{_EXCHANGE}{name}": variable for name, variable in per_replica_state(model).items()})
    tracked = (each for each in tf.train.TrackableView(model).descendants() if isinstance(each, tf.Variable))
    found.update({f"{_OTHERS}{number:04d}": variable for number, variable in enumerate(tracked)})
    return found


def _uncounted(name: str) -> str:
    return re.sub(r"/variable_\d+$", "/variable", name)


def _owner(name: str) -> int:
    """Returns the optimizer's number in a variable's name: "optimizer/0003", "optimizer/1/0003"."""
    _, *which, _ = name.split("/")
    return int(which[0]) if which else 0


def _optimizers(model: "keras.Model") -> list:
    """Returns a model's optimizers, the only one built; [] for a loop of the user's that updates weights itself."""
    from toolkit.strategies.variables import is_built, optimizers_of

    optimizers = optimizers_of(model)
    if len(optimizers) == 1 and not optimizers[0].built and is_built(model):
        with model.distribute_strategy.scope():
            optimizers[0].build(model.trainable_variables)
    return optimizers


def _may_differ(model: "keras.Model") -> bool:
    """Whether replicas may keep variables that differ."""
    return model.distribute_strategy.num_replicas_in_sync > 1


def _trained(model: "keras.Model", optimizers: list) -> dict[str, np.ndarray]:
    """Returns for each of several optimizers which variables it trains; only its first step shows that."""
    if len(optimizers) < 2:
        return {}
    from toolkit.strategies.variables import trained_by

    numbers = {id(variable): number for number, variable in enumerate(model.variables)}
    return {
        f"{_TRAINS}{which}": np.array([numbers[id(v)] for v in trained_by(optimizer)], np.int64)
        for which, optimizer in enumerate(optimizers)
        if optimizer.built and all(id(v) in numbers for v in trained_by(optimizer))
    }


def _build_optimizers(model: "keras.Model", optimizers: list, arrays: Mapping[str, np.ndarray]) -> None:
    """Builds those of several optimizers that have taken no step here, for the variables that they had."""
    for which, optimizer in enumerate(optimizers):
        numbers = arrays.get(f"{_TRAINS}{which}")
        if numbers is not None and not optimizer.built and max(numbers, default=0) < len(model.variables):
            with model.distribute_strategy.scope():
                optimizer.build([model.variables[number] for number in numbers])


def _metrics(model: "keras.Model") -> dict:
    return {
        f"{_METRICS}{number:04d}/{variable.name}": variable for number, variable in enumerate(model.metrics_variables)
    }


def _values(variables: dict) -> Arrays:
    """Returns values that stay as they are while training goes on."""
    return Arrays({name: _value(variable) for name, variable in variables.items()})


def _value(variable: Any) -> Later:
    import keras
    import tensorflow as tf

    from toolkit.strategies.step.sharded_variable import ReadTogether, ReplicaShardedVariable

    if isinstance(variable, ReplicaShardedVariable):
        own = tuple(np.asarray(shard.read_value()) for shard in variable.shards)
        return Later(
            shape=tuple(variable.shape),
            dtype=own[0].dtype,
            read=lambda: variable.whole_of(list(own)),
            own=own,
            together=variable.is_among_processes,
        )
    value = keras.ops.convert_to_tensor(variable)
    if isinstance(value, keras.Variable):
        value = np.asarray(value) if isinstance(value, ReadTogether) else value.value
    if isinstance(value, tf.Variable):
        value = tf.convert_to_tensor(value)
    # On the host NumPy sees a tensor's own memory, and no update changes that: TensorFlow writes into a variable's
    # memory only where nobody else holds it, and otherwise elsewhere. So the copy is made by the next step's
    # updates, on all cores, if at all. What a GPU holds is copied here.
    return Later.of(np.asarray(value))


def _assign(model: "keras.Model", variables: dict, arrays: Mapping[str, Later]) -> None:
    with model.distribute_strategy.scope():
        # In the same order on all processes: after setting a variable, TensorFlow reads it on each replica.
        # Variables that differ by replica come after the equal ones.
        for name in sorted(arrays, key=lambda name: (name.startswith(_EXCHANGE), name)):
            variables[name].assign(arrays[name].read())


def _shape(shape: tuple | None) -> str:
    return "no counterpart" if shape is None else f"shape {shape}"


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

    def capture(self) -> tuple[list[dict], dict[str, np.ndarray]]:
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

    def restore(self, plain: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> None:
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


def _packed(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
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


def _unpacked(packed: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
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
