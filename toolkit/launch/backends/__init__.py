"""The backends: where a job can run, in one or two files each. None imports another's.

Come here to change what happens at one of them only; what all share is in `toolkit.launch`.

local       this machine
ssh         hosts that ssh reaches
slurm       a batch script, submitted and followed
allocation  what it runs in its allocation: the supervisor, and an agent on each node
rendezvous  hosts that find one another at an address: who listens, who joins, what each proves
kubernetes  a manifest: an Indexed Job
"""
