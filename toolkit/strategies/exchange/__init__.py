"""How tensors are exchanged between replicas, and when: collectives, and sums of gradients.

mesh          groups of replicas that hold one copy of a sharded model between them
communication  NCCL or the ring between processes
collectives   exchanges between the replicas of a step, each with its gradient; several tensors as one
overlap       gradients that travel while others are computed, between processes
local_steps   steps without an exchange, and averages every so many
powersgd      gradients of matrices, sent as two thin factors
gradients     sums of gradients over replicas: in packs, rows beside one another, shards over their groups
"""
