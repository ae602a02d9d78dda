"""Which layers are replicated and which are sharded: come here to divide a model among replicas, and to see why so.

activations   examples and features between replicas
regularizers  regularizers and constraints of sharded variables
layers        ShardedDense and ShardedConv2D
graph         a model taken apart into layers, and copied with others
cost          what a layer does: operations, weights, activations
machine       what a machine does: how fast devices are, and what joins them
step          what a training step takes, by how each layer is divided
plan          the choice for each layer, with its reasons
apply         a plan put on a model, and the whole weights as a plain one
measuring     the speed of the devices here, and of what joins them
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "apply": ["parallelize", "plain"],
        "cost": ["costs"],
        "layers": ["ShardedConv2D", "ShardedDense"],
        "machine": ["Link", "Machine"],
        "measuring": ["measure"],
        "plan": ["Comparison", "Plan", "choose"],
        "step": ["Choice", "Setting"],
    },
)
