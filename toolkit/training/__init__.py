"""Everything around `fit`: the run directory, exact resume, the summary, the report for Ray, the learning rate.

A user needs one name, `Run`, and its `fit`.

checkpoints     what a run goes on from: variables, counters, random generators, the place in the data
loop            a model that stands for the user's own training loop
summary         what a run leaves when it ends: summary.json, its last line, the model's file
logs            metrics as single numbers, under the names of their columns
directory       the run directory: whose it is (run.json), who is in it
restore         bringing a model to where its run was stopped
schedule        the learning rate: scaled with the batch, warmed up, cosine decay
callbacks       what watches a run while it trains: speed, history, profile, checkpoints, signals
evaluator       follows the checkpoints of a run, in a task beside it
run             a run from its directory to its summary
"""

import lazy_loader

from toolkit.training.checkpoints.store import Checkpoint, CheckpointStore
from toolkit.training.evaluator import follow
from toolkit.training.run import Run
from toolkit.training.schedule import learning_rate

_CALLBACKS = {"callbacks.meter": ["Meter"], "callbacks.ray_report": ["RayReport"]}
__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs=_CALLBACKS)
__all__ = ["Checkpoint", "CheckpointStore", "Meter", "RayReport", "Run", "follow", "learning_rate"]
