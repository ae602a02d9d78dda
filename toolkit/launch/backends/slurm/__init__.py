"""Jobs under Slurm: a batch script, submitted, followed, and started again from the last checkpoint.

spec    what the job is to be, checked
batch   what the batch script runs in the allocation: srun, and a requeue where that helps
submit  the batch script, sbatch, the job's state, its logs, and its end
"""

from toolkit.launch.backends.slurm.spec import SlurmSpec
from toolkit.launch.backends.slurm.submit import script, submit

__all__ = ["SlurmSpec", "script", "submit"]
