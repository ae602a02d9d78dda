"""Our methods on models of our strategies, as attributes of the instances only.

A model is given them where it is made under one of our strategies, or where it is trained under one. Its class, its
files and its clones are as without us; under any other strategy Keras's own code runs.

No data set brings a batch that a script hands to `train_on_batch`, `test_on_batch` or `predict_on_batch`, so the
strategy doesn't divide it, and each replica would be given the whole of it: what is a sum or a count would be
multiplied by the number of replicas. Here such a batch is divided. A SavedModel has one variable where a strategy has
one on each device, of a sharded weight the first shard: `export` has it write whole weights, in one process.
"""

import contextlib
import functools
import logging
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.batches import dealt, row_count
from toolkit.strategies.check.first_step import check_first
from toolkit.strategies.context import this_step
from toolkit.strategies.fit import building
from toolkit.strategies.mesh import layout_of
from toolkit.strategies.pipelines import trains
from toolkit.strategies.processes.agreement import extremes, is_chief, processes
from toolkit.strategies.processes.shared_files import save
from toolkit.strategies.step import optimizer, share, xla
from toolkit.strategies.step.exchange_schedule import schedule
from toolkit.strategies.step.train_step import LoneStep, ReplicaStep, global_seeds, has_one_size, predict_own
from toolkit.strategies.step.whole_batch import watch
from toolkit.strategies.upstream import train_function
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.strategies.upstream.wrapping import attach
from toolkit.strategies.variables import optimizers_of, recreate_in_scope

_LOG = logging.getLogger(__name__)
_GIVEN = "_toolkit_methods"  # The id of the strategy whose methods a model has.


def prepare(model: Any) -> None:
    """Gives a model what it needs before it trains under one of our strategies; leaves other models alone."""
    recreate_in_scope(model)
    if mesh.is_toolkit_strategy(model._distribute_strategy):
        _attach_to(model)


def begin_model(original: Callable, model: Any) -> None:
    """Makes a model know the strategy under which it is created."""
    original(model)
    if mesh.is_toolkit_strategy(model._distribute_strategy):
        _attach_to(model)


def _attach_to(model: Any) -> None:
    strategy = model._distribute_strategy
    if vars(model).get(_GIVEN) != id(strategy):
        vars(model)[_GIVEN] = id(strategy)
        replicated = mesh.replica_count(strategy) > 1
        own = _METHODS_OF_REPLICAS if replicated else {} if hasattr(strategy, "replace_functions") else _METHODS_ALONE
        attach(model, **_METHODS, **own)
    if mesh.replica_count(strategy) > 1:
        for each in optimizers_of(model):
            optimizer.exchange_gradients(each)


def _compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
    """Gives each replica its own metrics and optimizer for a model that is compiled outside of the scope.

    Parameter servers' steps are computed without XLA, which can't compile their exchange.
    """
    strategy = model.distribute_strategy
    xla.forget_choice(model)
    with strategy.scope():
        original(model, *args, **kwargs)
        prepare(model)
    if model.jit_compile is True and hasattr(strategy, "replace_functions"):
        xla.turn_off(model)
        _LOG.warning(
            "jit_compile=True has no effect under this strategy: XLA can't compile what a step exchanges with "
            "parameter servers. The model trains without XLA"
        )


def _maybe_build(_: Callable, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    prepare(model)
    if hasattr(model.distribute_strategy, "replace_functions"):  # Else a model is built with a symbolic one.
        global_seeds(model)
    training = trains(iterator) and this_step.on_batch != "test"
    building.check(model, getattr(getattr(iterator, "data_adapter", None), "batch_size", None))
    if iterator is not None:
        spec = iterator._distributed_dataset.element_spec
        data_batch = building.batch_spec(spec, of_share=has_one_size(model))
    building.build(model, data_batch, trains=training)
    recreate_in_scope(model)  # Metrics that were made outside are among the model's now.


def _call_on_batch(kind: str, _: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has a script's batch divided between replicas, while Keras's method of this kind runs."""
    with this_step.having(on_batch=kind):
        # As it is now: `toolkit.models` replaces it while it looks for a script's model.
        return getattr(type(model), f"{kind}_on_batch")(model, *args, **kwargs)


def _make_function(kind: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has Keras make a function of steps that replicas make, of which XLA compiles no whole one."""
    step = None if kind == "predict" else ReplicaStep(model, f"{kind}_step")

    def make() -> Any:
        if step is not None:
            watch(model)
        with xla.kept_out(model), step.instead() if step is not None else contextlib.nullcontext():
            return original(model, *args, **kwargs)

    def put_around(function: StepFunction) -> None:
        function.put(Around.SPLITTING, functools.partial(_split, kind, model))
        check_first(kind, model, function)
        if kind == "train":
            xla.time_first(model, function)
            schedule(model, function)

    return train_function.make(model, kind, make, put_around)


def _make_function_alone(kind: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has Keras make a function of one replica's steps, which counts as several replicas do."""
    with LoneStep(model, f"{kind}_step").instead():
        return original(model, *args, **kwargs)


def _split(kind: str, model: Any, within: Callable, batches: Any) -> Any:
    if this_step.on_batch != kind:  # A data set's, or that of a callback's `evaluate` meanwhile.
        return within(batches)
    return within([_divided(model, batch) for batch in batches])


def _divided(model: Any, batch: Any) -> Any:
    """Returns a batch, which all processes have, with replicas' shares in place of tensors.

    What isn't by example, such as a number, is given to every replica. With a model for batches of one size, such as a
    stateful one, the first replica has all examples, and the others count for nothing.
    """
    batch = tf.nest.map_structure(_tensor, batch)
    leaves = tf.nest.flatten(batch)
    rows = next((int(row_count(leaf)) for leaf in leaves if _counts(leaf)), 0)
    divided = [_counts(leaf) and int(row_count(leaf)) == rows for leaf in leaves]
    return dealt(model.distribute_strategy, batch, divided, alone=has_one_size(model))


def _tensor(leaf: Any) -> Any:
    composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if leaf is None or composite else tf.convert_to_tensor(leaf)


def _counts(leaf: Any) -> bool:
    return leaf is not None and bool(leaf.shape.rank)


def _export(original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Exports the same files as on one device."""
    strategy = model.distribute_strategy
    together = processes(strategy) > 1
    with contextlib.ExitStack() as stack:
        for variable in model.variables:
            if layout_of(variable).in_shards:
                stack.enter_context(variable.in_one_place())
        if together and not is_chief(strategy):  # The directory is shared; for tracing, all processes use the same.
            filepath = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolkit-")), "exported")
        result = original(model, filepath, *args, **kwargs)
    if together:  # The other processes may load it next.
        extremes(strategy, np.array([0], np.int64))
    return result


def _quantize(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses what several workers can't do."""
    if processes(model.distribute_strategy) > 1:
        raise StrategyError(
            asked="model.quantize on several workers",
            found="TensorFlow sends no variables of 8 bits from one worker to the others",
            remedy="Save the model, load it in a process that trains alone, and quantize it there",
        )
    return original(model, *args, **kwargs)


_METHODS: dict[str, Callable] = {
    "compile": _compile,
    "_maybe_symbolic_build": _maybe_build,
    "_resolve_auto_jit_compile": xla.choose,
    "export": _export,
    "save": save,
    "save_weights": save,
}
_METHODS_ALONE: dict[str, Callable] = {
    f"make_{kind}_function": functools.partial(_make_function_alone, kind) for kind in ("train", "test", "predict")
}
_METHODS_OF_REPLICAS: dict[str, Callable] = {
    "_clear_losses": share.clear_losses,
    "predict_step": predict_own,
    "quantize": _quantize,
    **{f"{kind}_on_batch": functools.partial(_call_on_batch, kind) for kind in ("train", "test", "predict")},
    **{f"make_{kind}_function": functools.partial(_make_function, kind) for kind in ("train", "test", "predict")},
}
