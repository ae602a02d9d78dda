"""Which layers are replicated and which are sharded: come here to divide a model among replicas, and to see why so.

activations   examples and features between replicas
regularizers  regularizers and constraints of sharded variables
sharded       what layers have in common whose weights are sharded
layers        ShardedDense, ShardedEinsumDense and ShardedConv2D
embedding     ShardedEmbedding
attention     ShardedMultiHeadAttention and ShardedGroupedQueryAttention
graph         the layers within a model, and the model copied with others
kinds         which of Keras's layers have sharded ones, and layers made anew
trace         what the layers of a model do, seen in one call of it
operations    how many operations a layer's calls take
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
        "attention": ["ShardedGroupedQueryAttention", "ShardedMultiHeadAttention"],
        "embedding": ["ShardedEmbedding"],
        "layers": ["ShardedConv2D", "ShardedDense", "ShardedEinsumDense"],
        "machine": ["Link", "Machine"],
        "measuring": ["measure"],
        "plan": ["Comparison", "Plan", "choose"],
        "step": ["Choice", "Setting"],
    },
)
