"""By which functions our strategies answer for what is replaced of Keras and TensorFlow (`upstream/replaced.py`)."""

import tensorflow as tf

from toolkit.strategies.fit import callbacks, models, recompute
from toolkit.strategies.pipelines import announce
from toolkit.strategies.processes.shared_files import save_checkpoint
from toolkit.strategies.step import draws, optimizer, sharded_weights, share, tape, train_step
from toolkit.strategies.upstream import private, replaced, table
from toolkit.strategies.upstream.wrapping import add


def adapt_remat() -> None:
    """Makes Keras's rematerialization work, also on one device. Later calls do nothing."""
    replaced.REMAT.answer(toolkit=recompute.remat)


def adapt_keras() -> None:
    """Makes Keras's `fit`, callbacks and saving work under any of our strategies. Later calls do nothing."""
    replaced.SET_MODEL.answer(strategies=callbacks.set_model)
    replaced.MODEL.answer(strategies=models.begin_model)
    replaced.EPOCH_ITERATOR.answer(strategies=announce)


def adapt_replicas() -> None:
    """Gives steps of several replicas one device's numbers. Later calls do nothing."""
    adapt_keras()
    _adapt_autograph()
    _adapt_numbers()
    replaced.APPLY.answer(replicas=optimizer.apply)
    replaced.BUILD.answer(replicas=optimizer.build)
    replaced.GRADIENT.answer(replicas=tape.gradient)
    replaced.ADD_WEIGHT.answer(replicas=sharded_weights.add_weight)
    replaced.FUNCTION.answer(step=train_step.call_function)
    replaced.REDUCE.answer(replicas=share.reduced_values)
    adapt_draws()


def adapt_workers() -> None:
    """Makes saving safe for several processes as well."""
    adapt_replicas()
    replaced.SAVE_CHECKPOINT.answer(workers=save_checkpoint)


def adapt_draws() -> None:
    """Gives replicas one device's random numbers. Later calls do nothing."""
    replaced.NUMBERS.answer(replicas=draws.numbers, xla=draws.by_xla)
    replaced.NORMAL.answer(replicas=draws.normal, xla=draws.by_xla)
    replaced.INTEGERS.answer(replicas=draws.integers, xla=draws.by_xla)
    replaced.TRUNCATED.answer(replicas=draws.truncated, xla=draws.by_xla)
    replaced.GAMMA.answer(replicas=draws.gamma)
    replaced.BY_SEED.answer(replicas=draws.by_seed)
    replaced.BETWEEN.answer(replicas=draws.between)
    replaced.CLASSES.answer(replicas=draws.classes)
    replaced.SEED.answer(replicas=draws.next_seed)
    replaced.OPERATION_SEED.answer(replicas=draws.operation_seed)


def _adapt_autograph() -> None:
    """Runs this library's functions as they are in a user's `tf.function`. Later calls do nothing.

    Keras and TensorFlow are on AutoGraph's list of what it leaves alone, and this library belongs there too: of the
    functions that a step in a user's own loop reaches it would convert each one.
    """
    rules = private.config.CONVERSION_RULES
    if not any(str(each) == str(private.config.DoNotConvert("toolkit")) for each in rules):
        private.config.CONVERSION_RULES = (*rules, private.config.DoNotConvert("toolkit"))


def _adapt_numbers() -> None:
    """Lets variables of several replicas be used as numbers, as one device's can. Later calls do nothing.

    Keras's `float(variable)` is that of what it holds, and TensorFlow's class of it has none.
    """
    kind = table.find(table.row("DistributedVariable"))
    add(kind, "__float__", lambda variable: float(tf.convert_to_tensor(variable).numpy()))
    add(kind, "__int__", lambda variable: int(tf.convert_to_tensor(variable).numpy()))
