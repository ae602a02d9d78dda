"""Each worker reads data of its own, and one has less of it."""

import json

import processes
import pytest

SCRIPT = """
import json, os, sys
import toolkit
strategy = toolkit.strategies.create()
import keras, numpy, tensorflow as tf
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
count = (100, 73)[me]
data = tf.data.Dataset.from_tensor_slices((numpy.ones((count, 6), "float32"), numpy.ones(count, "int32"))).batch(20)
if sys.argv[1] == "unknown":
    data = data.filter(lambda *_: True)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
data = data.with_options(options)
history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
weights = [keras.ops.convert_to_numpy(v).tolist() for v in model.weights]
print("SEEN", json.dumps([history, weights, int(keras.ops.convert_to_numpy(model.optimizer.iterations))]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_epochs_end_together_with_the_shortest(tmp_path, length):
    with processes.group(["-c", SCRIPT], [[length]] * 2, tmp_path) as group:
        first, second = (json.loads(out.partition("SEEN ")[2]) for out in group.succeed(limit=150))
    assert first == second
    history, weights, steps = first
    assert steps == 8, "two epochs of four batches, which is what the second worker has"
    assert "NaN" not in json.dumps([history, weights])
