"""Layers whose weights are sharded over the replicas of a group.

activations   examples and features between replicas
base          what layers have in common whose weights are sharded
dense         ShardedDense, ShardedEinsumDense and ShardedConv2D
embedding     ShardedEmbedding
attention     ShardedMultiHeadAttention and ShardedGroupedQueryAttention
kinds         which of Keras's layers have sharded ones, and layers made again
"""
