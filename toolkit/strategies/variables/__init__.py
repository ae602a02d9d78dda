"""Variables of which replicas hold shards, and variables that all replicas hold alike.

model_optimizers  the optimizers of a model, and what each trains
stand_in      what takes a variable's place in an update, or in a step
read_together  variables of which each process has a part only
sharded_variable  a variable of which each replica of a group holds a shard
zero1         optimizer state in shards: each replica's part of the slots of what all have
outside       what was made outside of the strategy's scope, made again in it
equality      weights and statistics that all replicas are to have alike
"""
