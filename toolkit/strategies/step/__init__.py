"""One step's numbers, equal to one device's: losses, gradients and logs.

In the order of a step of `fit`: `train_step` is told its replica's share, losses are weighted by it, `optimizer` sums
gradients over replicas and updates, and `train_step` makes the logs the whole batch's.

collectives   tensors travel between replicas; by which library; how long a process waits for the slowest one
replicas      what a strategy tells each replica, and what it makes of their results
overlap       gradients travel between processes while others are computed
rows          how what a graph computes of a batch depends on its rows
trusted       what of Keras's computes each example for itself, as is known without its graph
xla           what XLA compiles of a step, in pieces between exchanges
sharded_variable  a variable of which each replica has a part
gathers       whole weights in a graph: when they are gathered, and again in the backward pass
sharded_weights  weights of which each replica has a part, and that layers read whole
trial         a step on tensors without values, and whether a replica's rows are enough for it
share         each replica's share of a batch, and losses and means weighted by it
moments       means and variances of the whole batch, by which layers normalise
view          a step that sees the whole batch, and layers that compute this replica's rows of it
whole_batch   losses and metrics that don't follow from those of a batch's parts
gradients     gradients on their way to all replicas, and their sum
sharded_optimizer  optimizers of sharded variables, and slots in parts (ZeRO-1)
compressed    gradients that a compression sends: what is the same for all of them
powersgd      gradients of matrices, sent as two factors
accumulation  gradients of several steps, added up by each replica for itself and exchanged once
local_steps   steps without an exchange, and averages of weights
exchanges     the list of ways in which gradients are exchanged
exchange_schedule  what steps do from some step on
train_step    the step itself: it knows its share, and its logs are the whole batch's; evaluation, prediction
optimizer     `apply`: gradients are summed over replicas, then each does what one device does
tape          gradients that the user's own step sees: those of the whole batch
"""
