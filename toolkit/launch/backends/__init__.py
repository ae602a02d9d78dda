"""The backends: where a job can run, in one or two files each. None imports another's.

Come here to change what happens at one of them only; what all share is in `toolkit.launch`.

local       this machine
ssh         hosts that ssh reaches
queued      a batch script, submitted to a queue and followed; what is a queue's own is in `toolkit.launch.queues`
allocation  what it runs in its allocation: the supervisor, and an agent on each node
rendezvous  hosts that find one another at an address: who listens, who joins, what each proves
kubernetes  a manifest: an Indexed Job
"""
