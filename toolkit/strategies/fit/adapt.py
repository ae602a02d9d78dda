"""What is wrapped of Keras and TensorFlow when a strategy is made; a trial, a view and recomputing wrap more when used.

Of two functions around the same one, the one that is wrapped last is called first.
"""

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.distribute import values

from toolkit.strategies.fit.callbacks import adapt_callbacks
from toolkit.strategies.fit.models import adapt_models
from toolkit.strategies.pipelines import adapt_epoch_iterator
from toolkit.strategies.processes.shared_files import adapt_checkpoints
from toolkit.strategies.step.optimizer import adapt_optimizers
from toolkit.strategies.step.share import adapt_means
from toolkit.strategies.step.tape import adapt_tapes
from toolkit.strategies.step.train_step import adapt_functions, adapt_seeds
from toolkit.support.wrapping import add

_UNCONVERTED = config.DoNotConvert("toolkit")


def adapt_keras() -> None:
    """Makes Keras's `fit`, callbacks and saving work under any of our strategies. Later calls do nothing."""
    adapt_callbacks()
    adapt_models()
    adapt_epoch_iterator()


def adapt_replicas() -> None:
    """Gives steps of several replicas one device's numbers. Later calls do nothing."""
    adapt_keras()
    _adapt_autograph()
    adapt_optimizers()
    _adapt_numbers()
    adapt_means()
    adapt_tapes()
    adapt_functions()
    adapt_seeds()


def adapt_workers() -> None:
    """Makes saving safe for several processes as well."""
    adapt_replicas()
    adapt_checkpoints()


def _adapt_autograph() -> None:
    """Runs this library's functions as they are in a user's `tf.function`. Later calls do nothing.

    Keras and TensorFlow are on AutoGraph's list of what it leaves alone, and this library belongs there too: of the
    functions that a step in a user's own loop reaches it would convert each one.
    """
    if _UNCONVERTED not in config.CONVERSION_RULES:
        config.CONVERSION_RULES = (*config.CONVERSION_RULES, _UNCONVERTED)


def _adapt_numbers() -> None:
    """Lets variables of several replicas be used as numbers, as one device's can. Later calls do nothing.

    Keras's `float(variable)` is that of what it holds, and TensorFlow's class of it has none.
    """
    add(values.DistributedVariable, "__float__", lambda variable: float(tf.convert_to_tensor(variable).numpy()))
    add(values.DistributedVariable, "__int__", lambda variable: int(tf.convert_to_tensor(variable).numpy()))
