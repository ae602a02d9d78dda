"""All that is wrapped of Keras and TensorFlow for our strategies, in one list: what is called first comes last."""

from toolkit.strategies.fit.callbacks import adapt_callbacks
from toolkit.strategies.fit.models import adapt_models
from toolkit.strategies.fit.out_of_scope import adapt_calls
from toolkit.strategies.input.epoch_iterator import adapt_epoch_iterator
from toolkit.strategies.processes.shared_files import adapt_checkpoints
from toolkit.strategies.step.batch_share import adapt_means
from toolkit.strategies.step.inlining import adapt_functions
from toolkit.strategies.step.optimizer import adapt_optimizers
from toolkit.strategies.step.tape import adapt_tapes
from toolkit.strategies.step.train_step import adapt_seeds

__all__ = ["adapt_keras", "adapt_replicas", "adapt_workers"]


def adapt_keras() -> None:
    """Has Keras's `fit`, callbacks and saving work under any strategy made here; called again, it does nothing."""
    adapt_callbacks()
    adapt_models()
    adapt_epoch_iterator()


def adapt_replicas() -> None:
    """Has steps of several replicas give one device's numbers; called again, it does nothing."""
    adapt_keras()
    adapt_optimizers()
    adapt_calls()
    adapt_means()
    adapt_tapes()
    adapt_functions()
    adapt_seeds()


def adapt_workers() -> None:
    """Has several processes save beside one another, too."""
    adapt_replicas()
    adapt_checkpoints()
