"""What is taken from the insides of TensorFlow and Keras is still there, and still does what is relied on."""

import inspect

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context

from toolkit.strategies.parameter_servers import internals


def test_the_coordinator_takes_python_functions_behind_its_public_method():
    """Fails when the public one takes them too, and calls them again knowingly: then `internals.schedule` can go."""
    public = inspect.getsource(tf.distribute.coordinator.ClusterCoordinator.schedule)
    assert "only accepts a `tf.function`" in public
    assert "self._cluster.schedule(" in public
    assert list(inspect.signature(cluster_coordinator.Cluster.schedule).parameters) == [
        "self",
        "function",
        "args",
        "kwargs",
    ]
    closure = inspect.getsource(cluster_coordinator.Closure.execute_on)
    assert "ops.device(worker.device_name)" in closure
    assert "with_dispatch_context(worker)" in closure


def test_the_worker_that_work_was_given_to_is_known():
    class Worker:
        worker_index = 3

    with coordinator_context.with_dispatch_context(Worker()):
        assert internals.worker_index() == 3


def test_gradients_pass_through_once_clipped():
    variable = keras.Variable([3.0, 4.0])
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    optimizer.build([variable])
    seen = []

    def halve(pairs):
        seen.extend(pairs)
        return [(gradient / 2, value) for gradient, value in pairs]

    with internals.gradients_through(optimizer, halve):
        optimizer.apply([tf.constant([6.0, 8.0])], [variable])
    ((gradient, value),) = seen
    assert value.ref() == variable.value.ref()
    assert gradient.numpy().tolist() == pytest.approx([0.6, 0.8])
    assert variable.numpy().tolist() == pytest.approx([2.7, 3.6])
    optimizer.apply([tf.constant([0.0, 0.1])], [variable])
    assert len(seen) == 1


def test_steps_outside_of_the_coordinator_are_allowed_by_an_attribute():
    from tensorflow.python.distribute import parameter_server_strategy_v2 as upstream

    assert "_allow_run_without_coordinator" in inspect.getsource(upstream.ParameterServerStrategyV2Extended)
