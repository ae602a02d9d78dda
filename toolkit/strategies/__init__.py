"""How variables and gradients are shared: come here to make a strategy by its name, for `fit` as it is.

A strategy is TensorFlow's own, with what Keras 3 lacks under it: the exchange of gradients, the same state on
all processes, steps that a chief dispatches to workers. One file per strategy, and a table of names:

exchange      how replicas exchange gradients: what a strategy is asked for
one_device    everything on one device
communication  NCCL or the ring between processes
sharing       a replica's share of each global batch
mesh          groups of replicas that hold one copy of a sharded model between them
hooks         what only private functions of TensorFlow allow
agreement     values that the processes of a strategy exchange between steps, and their barrier
collectives   exchanges between the replicas of a step, each with its gradient
replica_shards  a variable of which each replica of a group holds a shard
optimizers    the optimizers of a model, and what each trains
out_of_scope  what users do outside of steps and of a strategy's scope
building      variables, made before the first step
early_shares  a worker's share, cut before a batch's examples are decoded
step_logs     what a step of `fit` reports, over all replicas
overlap       gradients that travel while others are computed, between processes
weighting     how much a replica's means count in a step of `fit`
losses        losses whose weights and masks are those of the whole batch
moments       sums of a synchronised normalisation, in one exchange each way
state_shards  optimizer state in shards: each replica's part of what all have
shard_updates  what an optimizer needs for sharded variables
accumulation  gradients of several steps, added up by each replica for itself and exchanged once
summing       the sum of gradients over replicas: in packs, rows beside one another, shards over their groups
gradients     the exchange of gradients, after which each replica does what one device does
uneven_inputs  epochs that end for all with the shortest, where each worker reads data of its own
reducing      `reduce` as Keras's training loop calls it
shutdown      the shutdown barrier: processes that train together end together
consistency   what must be the same on all workers: facts, random numbers, data, weights, statistics
reading       how a worker reads: the whole data set, of which it keeps its share of each batch
shared_files  files that every worker writes under the same name
exporting     `Model.export`: whole weights, written by one process
fitting       what Keras's training loop needs from several processes
mirrored      a replica on each device of this machine, gradients all-reduced
parameter_servers  variables on parameter servers, and steps dispatched to workers, each applied once
resolving     who trains together, and the wait for the others
multi_worker  a replica on each device of several processes, gradients all-reduced
parameter_server  variables on parameter servers, steps dispatched to workers
table         names, `create`, what "auto" means, and what a strategy is
"""

from typing import Any

from toolkit.strategies.exchange import GradientExchange
from toolkit.strategies.parameter_servers import ParameterServerOptions
from toolkit.strategies.table import NAMES, create, describe

__all__ = [
    "NAMES",
    "GradientExchange",
    "ParameterServerOptions",
    "batch_mean",
    "computes_here",
    "create",
    "describe",
    "enable_fit",
    "is_chief",
    "report",
    "wait_for_steps",
]


def batch_mean(values, weights=None):
    """Returns a loss that is a mean over the whole batch, in a `train_step` or a loop of your own, on any strategy.

        loss = toolkit.strategies.batch_mean(errors, mask)     # in the place of sum(errors * mask) / sum(mask)

    Don't divide by a replica's own sum of weights: `fit` averages replicas by their examples, not by their weights.

    Args:
        values: Floating point numbers, such as one loss for each example or for each word; of any shape.
        weights: Of a shape that can be broadcast to that of `values`, such as a mask; None for 1.

    Returns:
        A scalar of the dtype of `values`. In `fit` replicas' scalars are averaged by their share of the examples, in
        a loop of your own their gradients are summed; both come to sum(values * weights) / sum(weights) over the whole
        batch, and 0 where all weights are 0. Call it outside of a `tf.function`, a branch or a loop within the step:
        replicas exchange their sums of weights.
    """
    from toolkit.strategies import weighting

    return weighting.batch_mean(values, weights)


def enable_fit(strategy):
    """Makes Keras 3's `fit` work under a MultiWorkerMirroredStrategy of your own; see `multi_worker.enable_fit`."""
    from toolkit.strategies import multi_worker

    return multi_worker.enable_fit(strategy)


def wait_for_steps(model: Any) -> None:
    """Waits until every step that was sent to a worker is done, and sets the step count and metrics.

    `fit` does so at the end of each epoch. Call it in a callback of your own before you read weights
    in mid-epoch. Under other strategies there is nothing to wait for.

    Args:
        model: A `keras.Model`.
    """
    if hasattr(model.distribute_strategy, "wait_for_steps"):
        model.distribute_strategy.wait_for_steps(model)


def report(model: Any) -> dict[str, Any]:
    """Returns what a run's summary says of the strategy: under parameter servers where variables
    are, the staleness of gradients, how many steps each worker did. Under other strategies {}.

    Args:
        model: A built and compiled `keras.Model`.
    """
    strategy = model.distribute_strategy
    return strategy.report(model) if hasattr(strategy, "report") else {}


def computes_here(strategy) -> bool:
    """Says whether training steps run in the process of `fit`; beside parameter servers they run in the workers."""
    return not hasattr(strategy, "wait_for_steps")


def is_chief(strategy) -> bool:
    """Says whether this process writes what all share; see `agreement.is_chief`."""
    from toolkit.strategies import agreement

    return agreement.is_chief(strategy)
