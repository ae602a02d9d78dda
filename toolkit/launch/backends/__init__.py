"""The places where a job can run, in one or two files each. None imports another's.

Come here to change what happens at one of them only; what all share is in `toolkit.launch`.

local       this machine
ssh         hosts that ssh reaches
slurm       a batch script, submitted and followed
allocation  what it runs in its allocation: the supervisor, and an agent on each node
token       who has it belongs to the job of a rendezvous
rendezvous_socket  the socket at which one launcher listens for the others
rendezvous  hosts that find one another at an address: the first that comes
joining     and the others
kubernetes  a manifest: an Indexed Job
"""
