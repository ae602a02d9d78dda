"""The private functions of TensorFlow that are wrapped: these fail when upstream changes or repairs itself."""

import processes
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

from toolkit import strategies
from toolkit.strategies import pipelines
from toolkit.strategies.upstream import replaced


def test_datasets_between_pipeline_and_device_are_not_tuned(monkeypatch, four_devices):
    made = []
    replaced.DEVICE_DATASET.answer(mirrored=pipelines.untuned_for_device)
    wrapped = multi_device_iterator_ops._create_device_dataset
    monkeypatch.setattr(
        multi_device_iterator_ops, "_create_device_dataset", lambda *a: made.append(wrapped(*a)) or made[-1]
    )
    iterator = multi_device_iterator_ops.OwnedMultiDeviceIterator(
        tf.data.Dataset.range(2), ["CPU:0"], source_device="CPU:0"
    )
    assert iterator.get_next()[0] == 0
    assert made, "TensorFlow makes its iterators differently: look whether tuning can be switched off in the open"
    assert all(dataset.options().autotune.enabled is False for dataset in made)


def test_an_operation_can_wait_for_one_that_was_made_later():
    with tf.Graph().as_default():
        first, second = tf.constant(1.0).op, tf.constant(2.0).op
        first._add_control_input(second)
        assert first.control_inputs == [second], "TensorFlow orders operations differently"


SEVERAL_STEPS = """
import sys
import toolkit
toolkit.devices.configure(gpus=2, emulate="always")
import keras, numpy, tensorflow as tf
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
if sys.argv[1] == "hooks":
    strategy = toolkit.strategies.create("mirrored", devices=("CPU:0", "CPU:1"))
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
model.fit(numpy.ones((16, 3)), numpy.ones((16, 1)), batch_size=4, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "hooks"])
def test_several_steps_per_execution_need_the_hook(tmp_path, kind):
    done = processes.python(tmp_path, "-c", SEVERAL_STEPS, kind, limit=120)
    if kind == "hooks":
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert "must feed a value for placeholder" in done.stderr, (
            "TensorFlow numbers collectives itself: the hook can go"
        )


def test_a_pipeline_for_each_replica_is_for_one_data_set_only(four_devices):
    theirs = tf.distribute.MirroredStrategy(list(four_devices[:2]))
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )

    def pipelines(strategy):
        counts = []
        for each in (None, options, None):
            strategy.distribute_datasets_from_function(
                lambda context: counts.append(context.num_input_pipelines) or tf.data.Dataset.range(4).batch(2), each
            )
        return counts[0], counts[-1]

    assert pipelines(theirs) == (1, 2), "TensorFlow is mended: input_devices_kept isn't needed"
    assert pipelines(strategies.create("mirrored", devices=four_devices[:2])) == (1, 1)
