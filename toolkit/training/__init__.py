"""Everything around `fit`: come here for a run directory, exact resume, the summary, or a learning rate.

A user needs one name, `Run`, and its `fit`. What a checkpoint holds is captured and restored in `saving`; what a run
shows is a callback, and all of them are made and put in order in `watching`.

checkpoints     a directory of checkpoints: arrays and a manifest with their SHA-256
loop            a model that stands for a training loop of the user's own
state           a model's variables as arrays, and back
host_state      the counters of a user's callbacks, and random generators
together        what processes compare before training, and the chief's checkpoint broadcast to all
results         what a run leaves when it ends: summary.json, its last line, the model's file
directory       the run directory: whose it is, who is in it
position        where training stands
tracker         the callback that counts steps, and how fast they go
data_position   bringing a user's data to where training stands
restoring       bringing a model to where its run was stopped
signals         SIGINT, SIGTERM and SIGHUP: all processes stop after the same step
rates           the learning rate: scaled with the batch, warmed up, cosine decay
profiling       a profile of a few steps, and where the time of a step goes
meter           a step's time, and the bytes that the network brought
recording       what an epoch came to: history.csv, the screen, TensorBoard, the launcher
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
