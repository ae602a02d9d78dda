"""How variables and gradients are shared: one file per strategy, and a table of names.

one_device    everything on one device
wrapping      a function of somebody else's, wrapped once
hooks         what only TensorFlow's insides allow
mirrored      a replica on each device of this machine, gradients all-reduced
agreement     values that the processes of a strategy agree on, between steps
seeds         the same random numbers on every process
sharing       a replica's share of each global batch
ending        epochs that end together, where each worker reads data of its own
statistics    one value on all workers for what each has estimated
leaving       the end of a process that others train with
weights       whether all workers hold the same weights
fitting       what Keras's training loop needs from several processes
multi_worker  a replica on each device of several processes, gradients all-reduced
table         names, `create`, and what "auto" means
"""

from toolkit.strategies.table import NAMES, create

__all__ = ["NAMES", "create", "enable_fit", "is_chief"]


def enable_fit(strategy):
    """Makes Keras 3's `fit` work under a MultiWorkerMirroredStrategy of your own; see `multi_worker.enable_fit`."""
    from toolkit.strategies import multi_worker

    return multi_worker.enable_fit(strategy)


def is_chief(strategy) -> bool:
    """Says whether this process writes what all share; see `agreement.is_chief`."""
    from toolkit.strategies import agreement

    return agreement.is_chief(strategy)
