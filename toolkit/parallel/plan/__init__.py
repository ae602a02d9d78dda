"""The choice for each layer: what layers cost, how long a step takes, and how a plan is chosen.

    a model -> trace, count: what each layer does -> step_cost: what a division costs -> choose: the best

trace         what the layers of a model do, seen in one call of it
count         what a layer does: operations, weights, activations, memory; what an optimizer keeps for it
step_cost     how layers are divided, and what a step then costs a replica of some machine: exchanges, memory, time
choose        the choice for each layer, with its reasons; the fastest plan with some memory
measure       the speed of the devices here, and of the network between them
"""
