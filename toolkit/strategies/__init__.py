"""How variables and gradients are shared: one file per strategy, and a table of names.

exchange      how gradients travel, as a strategy is told
one_device    everything on one device
hooks         what only TensorFlow's insides allow
agreement     values that the processes of a strategy agree on, between steps
collectives   exchanges between the replicas of a step, each with its gradient
sharded       a variable of which each replica holds a part
gradients     how gradients travel, and what an optimizer does with them
mirrored      a replica on each device of this machine, gradients all-reduced
seeds         the same random numbers on every process
sharing       a replica's share of each global batch
ending        epochs that end together, where each worker reads data of its own
statistics    one value on all workers for what each has estimated
leaving       the end of a process that others train with
weights       whether all workers hold the same weights
fitting       what Keras's training loop needs from several processes
parameter_servers  how variables on parameter servers are pulled, pushed and counted, and steps handed out
multi_worker  a replica on each device of several processes, gradients all-reduced
parameter_server  variables on parameter servers, steps handed out to workers
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
    "computes_here",
    "create",
    "describe",
    "enable_fit",
    "is_chief",
    "report",
    "settle",
]


def enable_fit(strategy):
    """Makes Keras 3's `fit` work under a MultiWorkerMirroredStrategy of your own; see `multi_worker.enable_fit`."""
    from toolkit.strategies import multi_worker

    return multi_worker.enable_fit(strategy)


def settle(model: Any) -> None:
    """Waits until every step is done that was sent to a worker, and sets the step count and metrics.

    `fit` does so at the end of each epoch. Call it in a callback of your own before you read weights
    in mid-epoch. Under other strategies there is nothing to wait for.

    Args:
        model: A `keras.Model`.
    """
    if hasattr(model.distribute_strategy, "settle"):
        model.distribute_strategy.settle(model)


def report(model: Any) -> dict[str, Any]:
    """Returns what the strategy has to say of a training: under parameter servers where variables
    are, how stale gradients were, who did how many steps. Under other strategies {}.

    Args:
        model: A built and compiled `keras.Model`.
    """
    strategy = model.distribute_strategy
    return strategy.report(model) if hasattr(strategy, "report") else {}


def computes_here(strategy) -> bool:
    """Says whether training steps run in the process of `fit`; beside parameter servers they run in the workers."""
    return not hasattr(strategy, "settle")


def is_chief(strategy) -> bool:
    """Says whether this process writes what all share; see `agreement.is_chief`."""
    from toolkit.strategies import agreement

    return agreement.is_chief(strategy)
