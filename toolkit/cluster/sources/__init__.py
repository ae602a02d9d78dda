"""Finds a cluster without TF_CONFIG, from the environment that a launcher leaves.

Come here to teach the toolkit another launcher: a file with a function `membership(environ)`, and a place in
`cluster/discovery.py`.

ranks       what launchers have in common that only number their processes
slurm       the membership of a process in an srun step; Slurm's compressed lists written out
open_mpi    the membership of a process that mpirun started
kubernetes  the membership of a pod in an Indexed Job
"""
