"""Everything around `fit`: run directory, checkpoints, exact resume, progress, the summary.

checkpoints  a directory of checkpoints: arrays and a manifest with their SHA-256
state        a model's variables as arrays, and back
finite       whether weights are still numbers
elsewhere    what a worker that isn't chief has in its place
handing      the chief's checkpoint, on every process
comparing    whether all processes are about to train the same
summary      what a run's summary says beside its figures
directory    the run directory: whose it is, who is in it
position     where training stands
signals      SIGINT, SIGTERM and SIGHUP, held back until the step is finished
stopping     a signal to one process stops all of them after the same step
length       epochs and the steps in each
rates        the learning rate: scaled with the batch, warmed up, cosine decay
throughput   images per second after warm-up
breakdown    where a step's time goes, read from a profile
profiling    a profile of a few steps
meter        a step's time, and the bytes that the network brought
progress     a progress bar for a terminal, lines for a log file
reporting    where training stands, told to the launcher
board        TensorBoard's files
history      history.csv, one row per epoch
saving       the callback that writes checkpoints and makes `fit` go on in mid-epoch
following    an evaluator, which follows the checkpoints
run          a run from its directory to its summary
"""

from typing import Any

from toolkit.training.checkpoints import Checkpoint, CheckpointStore
from toolkit.training.following import follow
from toolkit.training.length import Length
from toolkit.training.rates import learning_rate
from toolkit.training.run import Run


def __getattr__(name: str) -> Any:
    if name == "Meter":
        from toolkit.training.meter import Meter

        return Meter
    raise AttributeError(name)


__all__ = ["Checkpoint", "CheckpointStore", "Length", "Meter", "Run", "follow", "learning_rate"]
