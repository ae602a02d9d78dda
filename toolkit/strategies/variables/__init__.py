"""Variables of which replicas hold shards, and variables that all replicas hold alike.

stand_in      what takes a variable's place in an update, or in a step
sharded_variable  variables of which each process has a part only, such as a replica's shard
zero1         optimizer state in shards: each replica's part of the slots of what all have
model_optimizers  the optimizers of a model, and what each trains
outside       what was made outside of the strategy's scope, made again in it
equality      weights and statistics that all replicas are to have alike
"""
