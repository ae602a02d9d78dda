"""The list of everything wrapped of Keras and TensorFlow for our strategies. What is called first is wrapped last."""

from toolkit.strategies.fit.callbacks import adapt_callbacks
from toolkit.strategies.fit.models import adapt_models
from toolkit.strategies.fit.out_of_scope import adapt_calls
from toolkit.strategies.input.pipelines import adapt_epoch_iterator
from toolkit.strategies.processes.shared_files import adapt_checkpoints
from toolkit.strategies.step.batch_share import adapt_means
from toolkit.strategies.step.inlining import adapt_functions
from toolkit.strategies.step.optimizer import adapt_optimizers
from toolkit.strategies.step.tape import adapt_tapes
from toolkit.strategies.step.train_step import adapt_seeds

__all__ = ["adapt_keras", "adapt_replicas", "adapt_workers"]


def adapt_keras() -> None:
    """Makes Keras's `fit`, callbacks and saving work under any of our strategies. Later calls do nothing."""
    adapt_callbacks()
    adapt_models()
    adapt_epoch_iterator()


def adapt_replicas() -> None:
    """Gives steps of several replicas one device's numbers. Later calls do nothing."""
    adapt_keras()
    adapt_optimizers()
    adapt_calls()
    adapt_means()
    adapt_tapes()
    adapt_functions()
    adapt_seeds()


def adapt_workers() -> None:
    """Makes saving safe for several processes as well."""
    adapt_replicas()
    adapt_checkpoints()
