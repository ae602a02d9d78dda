"""Which layers are replicated and which are sharded: divides a model among replicas, and explains why.

graph         the layers within a model, and the model copied with others
layers        layers whose weights are sharded over replicas
plan          what layers cost, how long a step takes, and the choice for each layer
apply         a plan put on a model, and the whole weights as a plain one
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "apply": ["parallelize", "plain"],
        "layers.attention": ["ShardedGroupedQueryAttention", "ShardedMultiHeadAttention"],
        "layers.dense": ["ShardedConv2D", "ShardedDense", "ShardedEinsumDense"],
        "layers.embedding": ["ShardedEmbedding"],
        "plan.choose": ["Plan", "choose", "choose_within"],
        "plan.count": ["costs", "slots_of"],
        "plan.measure": ["measure"],
        "plan.step_cost": ["Choice", "Link", "Machine", "Setting"],
    },
)
