"""How variables and gradients are shared: creates strategies by name, under which Keras's `fit` works unchanged.

A strategy is TensorFlow's own, with what Keras 3 lacks under it: the exchange of gradients, the same state on
all processes, steps that a chief dispatches to workers. One file per strategy, and a table of names:

compression   what a way of sending gradients in fewer bytes is
options       what users give a strategy, and which options go together
mesh          which replicas exchange with which
context       what is known of the step that a thread is at
pipelines     the datasets that a strategy is given: what they are made of
batches       how a batch is divided between replicas and workers
variables     the variables and optimizers of a model, and those that were made outside of the strategy's scope
upstream      what is relied upon of Keras and TensorFlow
processes     what processes that train together agree on, and how they begin and end together
step          one step's numbers: shares of the batch, losses, gradients, logs
check         a second opinion: the first step, compared with one device's
fit           what Keras's `fit`, callbacks and saving need, and the list of what is wrapped
mirrored      a replica on each device of this machine, gradients all-reduced
parameter_servers  variables on parameter servers, and steps dispatched to workers, each applied once
multi_worker  a replica on each device of several processes, gradients all-reduced
table         names, `create`, what "auto" means, and `describe`
"""

from typing import Any

from toolkit.strategies.compression import Compression, Kept
from toolkit.strategies.options import GradientExchange, LocalSteps, ParameterServerOptions
from toolkit.strategies.table import NAMES, create, describe

__all__ = [
    "NAMES",
    "Compression",
    "GradientExchange",
    "Kept",
    "LocalSteps",
    "ParameterServerOptions",
    "batch_gradients",
    "batch_mean",
    "batch_rows",
    "computes_here",
    "create",
    "describe",
    "enable_fit",
    "is_chief",
    "report",
    "wait_for_steps",
]


def batch_gradients(gradients, variables):
    """Returns the whole batch's gradients in your own loop around `strategy.run`, such as to clip by their norm.

        gradients = toolkit.strategies.batch_gradients(tape.gradient(loss, variables), variables)
        optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], variables)

    `optimizer.apply` doesn't add them up once more. In `fit` there is no need for it: there `tape.gradient` itself
    returns the whole batch's gradients in your own `train_step`.

    Args:
        gradients: A tensor, `tf.IndexedSlices` or None for each variable, of a loss that is divided by the global
            batch, as TensorFlow's guides to such loops have it.
        variables: Keras variables.

    Returns:
        Sums over replicas, of the same shapes and dtypes; of a sharded layer this replica's part. On one device, and in
        `fit`, what was given.

    Raises:
        StrategyError: It is called in no `tf.function`.
    """
    from toolkit.strategies.step import tape

    return tape.batch_gradients(gradients, variables)


def batch_mean(values, weights=None):
    """Returns a loss that is a mean over the whole batch, in a `train_step` or your own loop, on any strategy.

        loss = toolkit.strategies.batch_mean(errors, mask)     # instead of sum(errors * mask) / sum(mask)

    Don't divide by a replica's own sum of weights: `fit` averages replicas by their examples, not by their weights.

    Args:
        values: Floating point numbers, such as one loss for each example or for each word; of any shape.
        weights: Of a shape that can be broadcast to that of `values`, such as a mask; None for 1.

    Returns:
        A scalar of the dtype of `values`. In `fit` replicas' scalars are averaged by their share of the examples, in
        your own loop their gradients are summed; both come to sum(values * weights) / sum(weights) over the whole
        batch, and 0 where all weights are 0. Call it outside of a `tf.function`, a branch or a loop within the step:
        replicas exchange their sums of weights.
    """
    from toolkit.strategies.step import share

    return share.batch_mean(values, weights)


def batch_rows(values):
    """Returns the rows of the whole batch, in the batch's order, in your own loop around `strategy.run`.

        scores = tf.matmul(left, toolkit.strategies.batch_rows(right), transpose_b=True)

    In `fit` there is no need for it: a `train_step` that compares examples sees the whole batch.

    Args:
        values: A tensor with this replica's examples along its first axis; of any dtype but strings.

    Returns:
        A tensor of the same dtype, the same on every replica. Its gradient adds up what the losses of all replicas ask
        of this replica's examples: divide each loss by the global batch, as TensorFlow's guides to such loops have it.
        On one device, what was given. Call it outside of a branch or a loop within the step.
    """
    from toolkit.strategies.step import share

    return share.batch_rows(values)


def enable_fit(strategy):
    """Makes Keras 3's `fit` work under your own MultiWorkerMirroredStrategy; see `multi_worker.enable_fit`."""
    from toolkit.strategies import multi_worker

    return multi_worker.enable_fit(strategy)


def wait_for_steps(model: Any) -> None:
    """Waits until all steps sent to workers are done, and sets the step count and the metrics.

    `fit` does so at the end of each epoch. Call it in your own callback before you read weights
    in mid-epoch. Under other strategies there is nothing to wait for.

    Args:
        model: A `keras.Model`.
    """
    if hasattr(model.distribute_strategy, "wait_for_steps"):
        model.distribute_strategy.wait_for_steps(model)


def report(model: Any) -> dict[str, Any]:
    """Returns a run summary's facts about the strategy: with parameter servers, where variables
    are, the staleness of gradients, how many steps each worker did. Under other strategies {}.

    Args:
        model: A built and compiled `keras.Model`.
    """
    strategy = model.distribute_strategy
    return strategy.report(model) if hasattr(strategy, "report") else {}


def computes_here(strategy) -> bool:
    """Returns whether training steps run in the process of `fit`; with parameter servers they run in workers."""
    return not hasattr(strategy, "wait_for_steps")


def is_chief(strategy) -> bool:
    """Returns whether this process writes shared files; see `agreement.is_chief`."""
    from toolkit.strategies.processes import agreement

    return agreement.is_chief(strategy)
