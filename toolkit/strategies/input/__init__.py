"""How a batch is divided among replicas, and what Keras's loop reads under a strategy.

pipelines     datasets: what they are made of, tf.data's tuning, and which one Keras's loop is about to read
batch_split   a replica's share of each global batch, also before a batch's examples are decoded
worker_input  how a worker reads: its share of the whole data, or its own data up to the shortest
"""
