#!/bin/bash
# sbatch job.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=8:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --requeue
# One process on each node trains on all of the node's GPUs. Two minutes before its time is up, train.py writes a
# checkpoint and ends with 143: the job is queued again, and goes on from there.

# Add the lines that your site needs for Python here, such as module load ... or source .venv/bin/activate.
srun python train.py
code=$?
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
