"""What models of our strategies have instead of some of Keras's methods: in their own attributes, and nobody else's.

A model is given them where it is made under one of our strategies, or where it is compiled or fitted under one. Its
class, its files and its clones are as without us; under any other strategy Keras's own code runs.
"""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from toolkit.strategies.exchange import mesh
from toolkit.strategies.fit.export import export
from toolkit.strategies.fit.out_of_scope import predict_once, quantize
from toolkit.strategies.processes.shared_files import save
from toolkit.strategies.step.train_step import make_function
from toolkit.support.wrapping import attach, wrap

__all__ = ["adapt_models", "attach_to"]


def adapt_models() -> None:
    """Has models know the strategy that they are made under; called again, it does nothing."""
    wrap(TensorFlowTrainer, "__init__", _made)


def _made(original: Callable, model: Any) -> None:
    original(model)
    attach_to(model)


def attach_to(model: Any) -> None:
    """Gives a model of one of our strategies what it needs there; others are left alone."""
    strategy = model._distribute_strategy
    if not mesh.made_here(strategy):
        return
    attach(model, "export", export)
    for name in ("save", "save_weights"):
        attach(model, name, save)
    if mesh.replicas(strategy) > 1:
        attach(model, "predict_on_batch", predict_once)
        attach(model, "quantize", quantize)
        attach(model, "make_train_function", functools.partial(make_function, "train_step"))
        attach(model, "make_test_function", functools.partial(make_function, "test_step"))
