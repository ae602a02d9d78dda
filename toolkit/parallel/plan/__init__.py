"""The choice for each layer: what layers cost, how long a step takes, and how a plan is chosen.

    a model -> trace, count: what each layer does -> step_time, memory: what a division costs -> choose: the best

arguments     the shapes and dtypes that a model takes
trace         what the layers of a model do, seen in one call of it
operations    how many operations a layer's calls take
footprint     what a layer's tensors take, from when to when
count         what a layer does: operations, weights, activations, memory
division      how layers are divided, and how much of each a replica has then
comm_model    what a replica exchanges in a step
machine       what a machine does: how fast devices are, and the network between them
memory        the memory that a replica needs for a step
step_time     how long a step takes, by how each layer is divided
slots         what an optimizer keeps for each weight
choose        the choice for each layer, with its reasons
within        the fastest plan with some memory
measure       the speed of the devices here, and of the network between them
"""
