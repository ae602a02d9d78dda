"""Everything around `fit`: come here for a run directory, exact resume, the summary, or a learning rate.

A user needs one name, `Run`, and its `fit`. What a checkpoint holds is captured and restored in `saving`; what a run
shows is a callback, and all of them are made and put in order in `watching`.

checkpoints     a directory of checkpoints: arrays and a manifest with their SHA-256
state           a model's variables as arrays, and back
random_state    the global random generators of Python, NumPy and TensorFlow
callback_state  the counters of a user's callbacks
finite          whether weights are still numbers
together        what processes compare before training, and the chief's checkpoint broadcast to all
summary         what summary.json says, and the last line of a run
model_file      the trained model as a file for plain Keras
directory       the run directory: whose it is, who is in it
position        where training stands
tracker         the callback that counts steps for all the others
data_position   bringing a user's data to where training stands
restoring       bringing a model to where its run was stopped
signals         SIGINT, SIGTERM and SIGHUP, held back until the step is finished
stopping        a signal to one process stops all of them after the same step
rates           the learning rate: scaled with the batch, warmed up, cosine decay
throughput      examples per second after warm-up
breakdown       where a step's time goes, read from a profile
profiling       a profile of a few steps
meter           a step's time, and the bytes that the network brought
progress        a progress bar for a terminal, lines for a log file
reporting       where training stands, reported to the launcher
board           TensorBoard's files
history         history.csv, one row per epoch
saving          the callback that writes checkpoints and makes `fit` go on in mid-epoch
watching        the callbacks of a run, made and put in order
following       an evaluator, which follows the checkpoints
run             a run from its directory to its summary
"""

import lazy_loader

from toolkit.training.checkpoints import Checkpoint, CheckpointStore
from toolkit.training.following import follow
from toolkit.training.rates import learning_rate
from toolkit.training.run import Run

__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs={"meter": ["Meter"]})
__all__ = ["Checkpoint", "CheckpointStore", "Meter", "Run", "follow", "learning_rate"]
