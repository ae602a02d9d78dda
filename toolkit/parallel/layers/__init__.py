"""Layers whose weights are sharded over the replicas of a group.

base          what layers have in common whose weights are sharded; examples and features between replicas
dense         ShardedDense, ShardedEinsumDense and ShardedConv2D
embedding     ShardedEmbedding
attention     ShardedMultiHeadAttention and ShardedGroupedQueryAttention
kinds         which of Keras's layers have sharded ones, and layers made again
"""
