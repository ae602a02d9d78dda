"""Which layers are replicated and which are sharded: come here to divide a model among replicas, and to see why so.

activations   examples and features between replicas
regularizers  regularizers and constraints of sharded variables
sharded       what layers have in common whose weights are sharded
layers        ShardedDense, ShardedEinsumDense and ShardedConv2D
embedding     ShardedEmbedding
attention     ShardedMultiHeadAttention and ShardedGroupedQueryAttention
graph         the layers within a model, and the model copied with others
kinds         which of Keras's layers have sharded ones, and layers made anew
arguments     the shapes and dtypes that a model takes
trace         what the layers of a model do, seen in one call of it
operations    how many operations a layer's calls take
footprint     what a layer's tensors take, from when to when
cost          what a layer does: operations, weights, activations, memory
choice        how layers are divided, and how much of each a replica has then
exchanges     what a replica exchanges in a step
machine       what a machine does: how fast devices are, and the network between them
memory        the memory that a replica needs for a step
step          how long a step takes, by how each layer is divided
plan          the choice for each layer, with its reasons
within        the fastest plan with some memory
apply         a plan put on a model, and the whole weights as a plain one
measuring     the speed of the devices here, and of the network between them
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
        "plan": ["Plan", "choose"],
        "choice": ["Choice", "Setting"],
        "within": ["choose_within"],
    },
)
