"""What users do under several processes, rightly or wrongly: right numbers, or a sentence, and never a hang."""

import json
import re

import processes
import pytest

HEAD = """
import json, os, sys, time
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, numpy as np
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
def build():
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model
def weights(model):
    return [keras.ops.convert_to_numpy(v).tolist() for v in model.weights]
model = build()
"""

pytestmark = pytest.mark.slow


def launch(folder, body, *flags):
    (folder / "train.py").write_text(HEAD + body)
    return processes.launch(folder, "--grace=3", *flags, "train.py", limit=150)


@pytest.mark.long
def test_generators_of_both_workers_stay_together(tmp_path):
    body = """
def batches():
    random = np.random.default_rng(1)
    while True:
        time.sleep(0.005 * me)
        rows = random.integers(0, 60, 7)
        yield x[rows], y[rows]
model.fit(batches(), steps_per_epoch=6, epochs=2, verbose=0)
other = build()
def few():
    for start in range(0, 56, 8):
        time.sleep(0.01 * me)
        yield x[start:start + 8], y[start:start + 8]
other.fit(few(), verbose=0)
steps = int(keras.ops.convert_to_numpy(other.optimizer.iterations))
print("SEEN", json.dumps([weights(model), weights(other), steps]))
"""
    first, second = processes.seen(launch(tmp_path, body))
    assert first == second
    assert "NaN" not in json.dumps(first)
    assert first[2] == 7, "each of the generator's batches is a step"


@pytest.mark.long
def test_one_array_without_labels_and_an_odd_batch(tmp_path):
    body = """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)
    def call(self, x):
        return self.dense(x)
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((x - y_pred) ** 2)
keras.utils.set_random_seed(3)
with strategy.scope():
    own = Own()
    own.compile("sgd")
own.fit(x, batch_size=21, verbose=0)
print("SEEN", json.dumps(weights(own)))
"""
    first, second = processes.seen(launch(tmp_path, body))
    assert first == second


@pytest.mark.long
def test_what_the_chief_saved_can_be_loaded_at_once(tmp_path):
    (tmp_path / "best.weights.h5").write_text("of an earlier run")
    (tmp_path / "whole.keras").write_text("of an earlier run")
    body = """
best = keras.callbacks.ModelCheckpoint("best.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True)
model.fit(x, y, batch_size=20, epochs=2, callbacks=[best], verbose=0)
model.load_weights("best.weights.h5")
model.fit(x, y, batch_size=20, verbose=0)
model.save("whole.keras")
again = keras.models.load_model("whole.keras")
print("SEEN", json.dumps([weights(model), weights(again)]))
"""
    first, second = processes.seen(launch(tmp_path, body))
    assert first == second
    assert first[0] == first[1]


def test_weights_that_differ_are_refused(tmp_path):
    body = """
if me == 0:
    model.set_weights([w + 1 for w in model.get_weights()])
model.fit(x, y, batch_size=20, verbose=0)
"""
    done = launch(tmp_path, body)
    assert done.returncode == 2
    assert "they begin with different values of" in done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.long
def test_weights_that_one_worker_sets_in_training_are_found(tmp_path):
    body = """
class Sets(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and me == 1:
            self.model.layers[-1].kernel.assign(np.ones((4, 1)))
model.fit(x, y, batch_size=20, epochs=5, verbose=0, callbacks=[Sets()])
"""
    done = launch(tmp_path, body)
    assert done.returncode == 2
    # At the end of the epoch, or before: it is compared as often as that costs little, beside steps of this machine.
    epoch = r"(step \d+ of )?epoch"
    found = (
        rf"after {epoch} 3, worker:1 had other values of \S*kernel than worker:0. After {epoch} 2 they were still equal"
    )
    assert re.search(found, done.stderr)
    assert "Traceback" not in done.stdout


def test_data_of_different_lengths_are_refused(tmp_path):
    done = launch(tmp_path, "model.fit(x[: 60 - 20 * me], y[: 60 - 20 * me], batch_size=20, verbose=0)")
    assert done.returncode == 2
    assert "different lengths, such as 2 and 3 batches" in done.stderr


@pytest.mark.long
def test_data_of_one_length_that_differ_are_said(tmp_path):
    done = launch(tmp_path, "model.fit(x + me, y, batch_size=20, verbose=0)")
    assert done.returncode == 0
    assert "worker:1 read a different first batch than worker:0" in done.stdout
    assert "PYTHONHASHSEED" not in done.stdout
    numbered = """
classes = list(set("cat dog emu fox gnu hen ibis jay".split()))
labels = np.array([classes.index(name) for name in sorted(classes)] * 5)
model.fit(x[:40], labels[:, None], batch_size=20, shuffle=False, verbose=0)
"""
    unlike = launch(tmp_path, numbered, "--env=PYTHONHASHSEED=random")
    assert "labels that are numbered by it: use sorted(), or set PYTHONHASHSEED=0" in unlike.stdout
    assert "first batch" not in launch(tmp_path, numbered).stdout
    same = launch(tmp_path, "model.fit(x, y, batch_size=20, verbose=0)")
    assert "first batch" not in same.stdout


@pytest.mark.long
def test_an_order_that_one_worker_shifts_is_said(tmp_path):
    body = """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60).batch(20)
class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if me == 0 and epoch == 0:
            next(iter(data))
model.fit(data, epochs=3, callbacks=[Look()], verbose=0)
"""
    done = launch(tmp_path, body)
    assert done.returncode == 0
    said = "worker:1 read other batches than worker:0"
    assert done.stdout.count(said) == done.stdout.count(f"In epoch 2 {said}") == 2, done.stdout  # Once on each.


@pytest.mark.long
def test_data_whose_functions_draw_differ_in_what_is_drawn_only(tmp_path):
    body = """
def noisy(x, y):
    return x + tf.random.normal(tf.shape(x)), y
import tensorflow as tf
model.fit(tf.data.Dataset.from_tensor_slices((x, y)).map(noisy, num_parallel_calls=2).batch(20), verbose=0)
"""
    done = launch(tmp_path, body)
    assert done.returncode == 0
    assert "noisy draws random numbers, in each worker others: the examples are the same" in done.stdout
    assert "never used" not in done.stdout


@pytest.mark.long
def test_one_that_stops_stops_all(tmp_path):
    body = """
class Enough(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1 and me == 1
history = model.fit(x, y, batch_size=20, epochs=5, callbacks=[Enough()], verbose=0)
print("SEEN", json.dumps([len(history.epoch)]))
"""
    assert processes.seen(launch(tmp_path, body)) == [[2], [2]]


def test_one_that_stops_within_an_epoch_stops_all_at_that_batch(tmp_path):
    body = """
def end(model):  # What a callback does is looked at where it ends, and not in its code.
    setattr(model, "stop" + "_training", True)
class Enough(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if me == 1 and batch == 4:
            end(self.model)
saved = keras.callbacks.ModelCheckpoint("here.keras", save_freq=7)
model.fit(x, y, batch_size=4, epochs=5, callbacks=[Enough(), saved], verbose=0)
assert saved.save_freq == 7  # Of a worker that isn't the chief, too.
print("SEEN", json.dumps(int(keras.ops.convert_to_numpy(model.optimizer.iterations))))
"""
    assert processes.seen(launch(tmp_path, body)) == [5, 5]


def test_a_call_that_others_do_not_make_is_named(tmp_path):
    body = """
import toolkit.strategies.processes.agreement, toolkit.strategies.processes.resolver
toolkit.strategies.processes.agreement._SILENCE = 2.0
toolkit.strategies.processes.resolver._END_SECONDS = 4.0
if me == 0: model.evaluate(x, y, batch_size=20, verbose=0)
"""
    done = launch(tmp_path, body)
    assert re.search(r"worker:0 has waited 2 s for the other workers, in evaluate at train.py, line \d+\.", done.stdout)


def test_a_call_that_others_answer_with_another_is_a_sentence(tmp_path):
    body = "if me == 0: model.evaluate(x, y, batch_size=20, verbose=0)\nmodel.fit(x, y, batch_size=4, verbose=0)"
    done = launch(tmp_path, body)
    assert done.returncode == 2
    said = (
        r"error: worker:[01] waits for the other workers, in (fit|evaluate) at train.py, line \d+, but another worker"
    )
    assert re.search(said, done.stdout + done.stderr)
    assert "Traceback" not in done.stdout


def test_one_that_ends_early_is_named(tmp_path):
    body = """
import toolkit.strategies.processes.resolver
toolkit.strategies.processes.resolver._END_SECONDS = 8.0  # That it waits at its exit for the others.
if me == 1: sys.exit(0)
model.fit(x, y, batch_size=4, epochs=50, verbose=0)
"""
    done = launch(tmp_path, body)
    assert done.returncode != 0
    assert "worker:1 had finished the script" in done.stderr


@pytest.mark.long
def test_the_end_of_one_is_no_part_of_the_others_sum(tmp_path):
    body = "if me == 0: print('SUM', strategy.reduce('SUM', tf.constant([5.0]), axis=None).numpy(), flush=True)"
    done = launch(tmp_path, body, "--stall_timeout=8")
    assert "SUM [6" not in done.stdout


@pytest.mark.long
def test_a_fork_of_a_worker_may_end(tmp_path):
    body = """
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
model.fit(x, y, batch_size=20, verbose=0)
print("SEEN", json.dumps([0]))
"""
    assert processes.seen(launch(tmp_path, body)) == [[0], [0]]


@pytest.mark.long
def test_a_model_in_bfloat16_predicts(tmp_path):
    body = """
keras.mixed_precision.set_global_policy("mixed_bfloat16")
model = build()
model.fit(x, y, batch_size=20, verbose=0)
shapes = [model.predict(x, batch_size=21, verbose=0).shape, model.predict_on_batch(x).shape]
print("SEEN", json.dumps([list(shape) for shape in shapes]))
"""
    assert processes.seen(launch(tmp_path, body)) == [[[60, 1], [60, 1]]] * 2
