"""Everything around `fit`: the run directory, exact resume, the summary, the report for Ray, the learning rate.

A user needs one name, `Run`, and its `fit`.

checkpoints    a directory of checkpoints: arrays and a manifest with their SHA-256; writing one while training goes on
state          what a checkpoint holds of a model, its callbacks and random generators, and how it is set again
loop           a model that stands for the user's own training loop
directory      the run directory: whose it is (run.json), who is in it; the model's file
copying        a copy of the run directory in a bucket, from which another machine goes on: the run's side of it
copier         the process that copies, and brings back what a machine lacks
summary        summary.json, and the last line of a run
data_position  bringing a user's data to where training stands
restore        bringing a model to where its run was stopped, in all processes
progress       steps, speed, time spent; what an epoch came to: history.csv, the screen, TensorBoard, the launcher
step_time      how long a step takes, the bytes it received, and where its time goes
checkpointer   writes checkpoints, makes `fit` go on in mid-epoch, and stops all processes after the same step
ray_report     tells Ray Train what an epoch came to
schedule       the learning rate: scaled with the batch, warmed up, cosine decay
evaluator      follows the checkpoints of a run, in a task beside it
run            a run from its directory to its summary
"""

import lazy_loader

from toolkit.training.checkpoints import Checkpoint, CheckpointStore
from toolkit.training.evaluator import follow
from toolkit.training.run import Run
from toolkit.training.schedule import learning_rate

_CALLBACKS = {"ray_report": ["RayReport"], "step_time": ["StepTimer"]}
__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs=_CALLBACKS)
__all__ = ["Checkpoint", "CheckpointStore", "RayReport", "Run", "StepTimer", "follow", "learning_rate"]
