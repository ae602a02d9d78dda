"""Jobs under Slurm: a batch script, submitted, followed, and started again from the last checkpoint.

request  what the job is to be, checked
script   the batch script
batch    what the batch script runs in the allocation: srun, and a requeue where that helps
submit   sbatch, the job's state, its logs, and its end
"""

from toolkit.launch.backends.slurm.request import Request
from toolkit.launch.backends.slurm.script import script
from toolkit.launch.backends.slurm.submit import submit

__all__ = ["Request", "script", "submit"]
