"""What isn't done for nobody: sharded weights gathered, weights copied to evaluate, others' examples decoded."""

import processes
import pytest

SCRIPT = """
import json, os
import tensorflow as tf
import toolkit
strategy = toolkit.strategies.create("multi_worker")
import keras, numpy as np
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), toolkit.parallel.ShardedDense(6), keras.layers.Dense(1)])
    model.compile("adam", "mse")
gathered = []
take = ReplicaShardedVariable.take_snapshot
ReplicaShardedVariable.take_snapshot = lambda self: (gathered.append(self.path), take(self))[1]
def epochs_with(*callbacks):
    gathered.clear()
    model.fit(x, y, batch_size=20, epochs=3, callbacks=list(callbacks), verbose=0)
    return len(gathered) // len(set(gathered))
stop = keras.callbacks.EarlyStopping(monitor="loss")
plain = epochs_with(stop, keras.callbacks.CSVLogger(f"{me}.csv"))
seen = []
save = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.layers[0].kernel.numpy().tolist()))
saving = epochs_with(*([save] if me == 0 else []))
best = epochs_with(keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True))

def refuse(*_):
    raise AssertionError("copied to the host")
keras.ops.convert_to_numpy = refuse
loss = model.evaluate(x, y, verbose=0)
rows = len(model.predict(x, verbose=0))
def noting(seen):
    def note(n):
        seen.append(int(n))
        return n
    return lambda n: tf.ensure_shape(tf.numpy_function(note, [n], tf.int64, stateful=False), ())
def decode(n):
    n = noting(decoded)(n)
    return tf.gather(x, n), tf.gather(y, n)
found, decoded = [], []
numbers = tf.data.Dataset.range(40).map(noting(found)).shuffle(40)
with strategy.scope():
    again = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    again.compile("sgd", "mse")
again.fit(numbers.map(decode, num_parallel_calls=2).batch(20), epochs=2, verbose=0)
print("SEEN", json.dumps([plain, saving, best, len(seen), len(found), decoded, loss, rows]))
"""


def launched(folder, script):
    (folder / "train.py").write_text(script)
    done = processes.launch(folder, "--grace=3", "train.py", limit=150)
    assert done.returncode == 0, done.stdout[-2500:] + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.long
def test_nothing_is_gathered_copied_or_decoded_for_nobody(tmp_path):
    first, theirs = processes.seen(launched(tmp_path, SCRIPT))
    plain, saving, best, saved, count, decoded, loss, rows = first
    assert plain == 1, "at the end of fit, after which a chief alone may save"
    assert saving == best == 1 + 3
    assert saved == 3
    assert [loss, rows] == theirs[-2:]
    assert rows == 40
    assert {*decoded, *theirs[5]} == {*range(40)}
    assert 2 * len(decoded) <= count, "Keras may make an iterator that it doesn't use to its end"


CHECKPOINTS = """
import json, os
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, numpy as np
with strategy.scope():
    model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(2000), keras.layers.BatchNormalization()])
    model.compile("adam", "mse")
model.fit(np.ones((64, 200), "float32"), np.zeros((64, 2000), "float32"), verbose=0)
it = tf.train.Checkpoint(model=model)
for _ in range(15):
    it.save("plain/it")
manager = tf.train.CheckpointManager(it, "managed", max_to_keep=2)
for _ in range(15):
    path = manager.save()
other = keras.models.clone_model(model)
tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
print("SEEN", float(np.abs(other.get_weights()[0] - model.get_weights()[0]).max()))
"""


@pytest.mark.slow
def test_checkpoints_of_tensorflows_that_every_worker_saves_under_one_name_are_whole(tmp_path):
    done = launched(tmp_path, CHECKPOINTS)
    assert done.stdout.count("SEEN 0.0") == 2
    left = sorted(path.name for path in (tmp_path / "managed").iterdir())
    assert len([name for name in left if name.endswith(".index")]) == 2
    assert all(name.startswith(("checkpoint", "ckpt-")) for name in left)


READS = """
import json, sys
import tensorflow as tf
import toolkit
from toolkit.strategies.batches import ReadsShares
strategy = toolkit.strategies.create("multi_worker")
import keras, numpy as np
random = np.random.default_rng(0)
x = random.normal(size=(203, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
def trained():
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((x, y))
    of_unknown_length = data.filter(lambda *_: True).batch(30)
    twice = data.map(lambda a, b: (a * 2, b)).batch(30)
    # Of arrays TensorFlow's own iterators crash at times when they are dropped: see reading.py.
    history = model.fit(twice, epochs=2, validation_data=data.batch(30), verbose=0).history
    more = model.fit(of_unknown_length, epochs=2, verbose=0).history
    found = model.predict(data.map(lambda a, _: a).batch(30), verbose=0).tolist()
    left = [model.evaluate(data.batch(30), verbose=0), found, model.get_weights()[0].tolist()]
    return [history, more, left]
seen = [trained()]
ReadsShares._has_one_device = lambda self: False  # As with several.
seen.append(trained())
print("SEEN", seen[0] == seen[1], len(seen[0][2][1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.long
def test_batches_that_tensorflow_brings_to_a_device_are_those_that_stay_on_the_host(tmp_path):
    done = launched(tmp_path, READS)
    assert done.stdout.count("SEEN True 203") == 2
