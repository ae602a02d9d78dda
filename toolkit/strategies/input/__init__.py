"""How a batch is divided among replicas, and what Keras's loop reads under a strategy.

epoch_iterator  which data Keras's loop is about to read
pipelines     pipelines without tf.data's tuning
components    which components of a batch have examples along their first axis
batch_split   a replica's share of each global batch
early_split   a worker's share, cut before a batch's examples are decoded
draws         random numbers that a dataset's functions draw
same_order    the batches of each process's data, which must be the same
uneven_inputs  epochs that end for all with the shortest, where each worker reads its own data
worker_input  how a worker reads: the whole data set, of which it keeps its share of each batch
"""
