"""One step's numbers, equal to one device's: losses, gradients and logs.

In the order of a step of `fit`: `train_step` is told its replica's share, losses are weighted by it, `optimizer` sums
gradients over replicas and updates, and `train_step` makes the logs the whole batch's.

xla           what XLA compiles of a step, in pieces between exchanges
inlining      a tf.function that a step calls, as a part of it
lateness      how long a process waits for the slowest one
rows          how what a graph computes of a batch depends on its rows
trial         a step on tensors without values, and whether a replica's rows are enough for it
batch_share   each replica's share of a batch, and losses and means weighted by it
view          a step that sees the whole batch, and layers that compute this replica's rows of it
results       which tensors of a step are results of metrics
shown         whether rows are enough for a model's step, found out once for each kind of data
kinds         which losses and metrics follow from those of a batch's parts, as their graphs show
whole_batch   losses and metrics that don't, computed of the whole batch
layer_losses  what layers add to the loss, kept by replica
moments       sums of a synchronised normalisation, in one exchange each way
no_examples   a replica without examples leaves its metrics and statistics as they were
compression   what an optimizer keeps for gradients that are compressed
local_state   what replicas that train by themselves keep of their own
exchange_schedule  what steps do from some step on
step_count    how many steps a model has made
single_rows   why a step can't take the rows of a batch apart
predict_step  predictions of a replica's examples, and what isn't by example once
train_step    the step itself: it knows its share, and its logs are the whole batch's
sharded_optimizer  what an optimizer needs for sharded variables
accumulation  gradients of several steps, added up by each replica for itself and exchanged once
routes        which gradients are still to be exchanged, where a tape has exchanged some
loss_scale    losses that are scaled, and steps that overflow
optimizer     `apply`: gradients are summed over replicas, then each does what one device does
tape          gradients that the user's own step sees: those of the whole batch
"""
