"""What `placement/internals.py` takes from TensorFlow is still there, and still says what is read from it."""

import tensorflow as tf

from toolkit.observe.placement import kernels, recording


def test_a_function_is_recorded_as_asked_and_as_placed():
    given = tf.ones(3)
    with recording() as recorded:
        tf.function(tf.nn.relu).get_concrete_function(given)(given)
    (metadata,) = recorded
    (graph,) = metadata.function_graphs
    assert "Relu" in {node.op for node in graph.pre_optimization_graph.node}
    assert all(node.device for part in graph.partition_graphs for node in part.node)


def test_kernels_are_listed_by_kind_of_device():
    assert "CPU" in kernels("MatMul")
    assert "CPU" not in kernels("NcclAllReduce")
