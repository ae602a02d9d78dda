"""Our methods on models of our strategies, as attributes of the instances only.

A model is given them where it is made under one of our strategies, or where it is trained under one. Its class, its
files and its clones are as without us; under any other strategy Keras's own code runs.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from toolkit.strategies.context import here
from toolkit.strategies.exchange import mesh
from toolkit.strategies.fit import building
from toolkit.strategies.fit.export import export
from toolkit.strategies.fit.on_batch import call_on_batch, make_dividing
from toolkit.strategies.fit.out_of_scope import quantize
from toolkit.strategies.input.pipelines import trains
from toolkit.strategies.processes.shared_files import save
from toolkit.strategies.step import layer_losses, optimizer
from toolkit.strategies.step.predict_step import predict_own
from toolkit.strategies.step.train_step import make_function
from toolkit.strategies.variables.model_optimizers import optimizers_of
from toolkit.strategies.variables.outside import holds_variables, take_in
from toolkit.support.wrapping import attach, wrap

__all__ = ["adapt_models", "prepare"]

_LOG = logging.getLogger(__name__)


def adapt_models() -> None:
    """Makes models know the strategy under which they are created. Later calls do nothing."""
    wrap(TensorFlowTrainer, "__init__", _made)


def prepare(model: Any) -> None:
    """Gives a model what it needs before it trains under one of our strategies; leaves other models alone."""
    take_in(model)
    if mesh.made_here(model._distribute_strategy):
        _attach_to(model)


def _made(original: Callable, model: Any) -> None:
    original(model)
    if mesh.made_here(model._distribute_strategy):
        _attach_to(model)


def _attach_to(model: Any) -> None:
    strategy = model._distribute_strategy
    attach(model, "compile", _compile)
    attach(model, "_maybe_symbolic_build", _maybe_build)
    attach(model, "export", export)
    for name in ("save", "save_weights"):
        attach(model, name, save)
    if mesh.replicas(strategy) > 1:
        layer_losses.attach_to(model)
        attach(model, "predict_step", predict_own)
        attach(model, "quantize", quantize)
        attach(model, "make_train_function", functools.partial(make_function, "train_step"))
        attach(model, "make_test_function", functools.partial(make_function, "test_step"))
        for kind in ("train", "test", "predict"):
            attach(model, f"{kind}_on_batch", functools.partial(call_on_batch, kind))
            attach(model, f"make_{kind}_function", functools.partial(make_dividing, kind))
        for each in optimizers_of(model):
            optimizer.attach_to(each)


def _compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
    """Gives each replica its own metrics and optimizer for a model that is compiled outside of the scope.

    XLA is left out of a step that exchanges something: it can't compile that, and the first step would end there.
    """
    strategy = model.distribute_strategy
    if not holds_variables(strategy):
        original(model, *args, **kwargs)
        return
    with strategy.scope():
        original(model, *args, **kwargs)
        prepare(model)
    if model.jit_compile is True:
        model.jit_compile = False
        _LOG.warning(
            "jit_compile=True has no effect under this strategy: XLA can't compile what replicas or parameter servers "
            "exchange in a step. The model trains without XLA"
        )


def _maybe_build(_: Callable, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    prepare(model)
    building.check(model, getattr(getattr(iterator, "data_adapter", None), "batch_size", None))
    if iterator is not None:
        data_batch = building.batch_spec(iterator._distributed_dataset.element_spec)
    building.build(model, data_batch, trains=trains(iterator) and here.on_batch != "test")
