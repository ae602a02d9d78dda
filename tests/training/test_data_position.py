"""Data of any kind is brought to where training stood, so that the weights are those of an undisturbed run.

Each kind trains a small model for three epochs of five batches, once undisturbed, and once stopped and resumed. What
Keras does with iterators is relied upon in `data_position`; these tests fail when it changes.
"""

import logging
import os
import signal

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import DataError, ModelError, StoppedBySignal
from toolkit.training import CheckpointStore, Run

EPOCHS, BATCH, COUNT = 3, 4, 20
X = np.random.default_rng(1).normal(size=(COUNT, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + 0.1


class StopAfter(keras.callbacks.Callback):
    """Sends this process a signal after so many training steps of its own, or at the end of an epoch."""

    def __init__(self, steps=None, epoch=None, validation=False):
        super().__init__()
        self.steps, self.epoch, self.validation, self.done = steps, epoch, validation, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_test_batch_begin(self, batch, logs=None):
        if self.validation:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGTERM)


class Sequence(keras.utils.PyDataset):
    """As people write it: in an order of its own, drawn again by NumPy after each epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(COUNT)
        np.random.shuffle(self.order)

    def __len__(self):
        return COUNT // BATCH

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Growing(keras.utils.PyDataset):
    """Has another length in each epoch, which on_epoch_begin or on_epoch_end changes."""

    def __init__(self, by, changes):
        super().__init__()
        self.count = 3 if by > 0 else 5
        setattr(self, changes, lambda: setattr(self, "count", self.count + by))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows] + self.count, Y[rows]


def tensors(folder):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT).batch(BATCH).prefetch(2)


def of_unknown_length(folder):
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda *_: True).shuffle(7).batch(BATCH)


def noisy(folder):
    """Draws that come from a state which all elements share, one after another."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT)
    return data.map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y)).batch(BATCH).prefetch(2)


def noisy_by_position(folder):
    def add(number, example):
        x, y = example
        return x + tf.random.stateless_normal(tf.shape(x), seed=(1, number)), y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT).repeat().enumerate()
    return data.map(add, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(2)


def records(folder):
    path = str(folder / "examples.tfrecord")
    if not os.path.exists(path):
        with tf.io.TFRecordWriter(path) as file:
            for x, y in zip(X, Y, strict=True):
                file.write(tf.io.serialize_tensor(np.concatenate([x, y])).numpy())

    def parse(record):
        both = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [4])
        return both[:3], both[3:]

    return tf.data.TFRecordDataset(path).shuffle(11).map(parse, num_parallel_calls=2).batch(BATCH).prefetch(1)


def endless(folder):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT).repeat().batch(BATCH)


def python_generator(folder):
    while True:
        rows = np.random.randint(0, COUNT, BATCH)
        yield X[rows], Y[rows]


def generated(folder):
    def examples():
        yield from zip(X, Y, strict=True)

    signature = (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((1,), tf.float32))
    return tf.data.Dataset.from_generator(examples, output_signature=signature).shuffle(9).batch(BATCH)


def grain_loader(folder):
    grain = pytest.importorskip("grain", reason="Grain isn't installed")
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).shuffle(seed=3).batch(BATCH)


KINDS = {
    "tensors": (tensors, None),
    "unknown length": (of_unknown_length, None),
    "TFRecord files": (records, None),
    "endless": (endless, 5),
    "noisy": (noisy, None),
    "noisy by position": (noisy_by_position, 5),
    "a generator of tf.data's": (generated, None),
    "a generator": (python_generator, 5),
    "a PyDataset": (lambda _: Sequence(), None),
    "arrays": (lambda _: (X, Y), None),
    "Grain": (grain_loader, None),
}
# Under a strategy nothing is saved, and all are read again: one of each sort that Keras has iterators of its own for.
CASES = [(kind, 1) for kind in KINDS] + [(kind, 2) for kind in ("tensors", "unknown length", "endless", "a generator")]
# Kinds that most people train with; the others differ in what they read.
SHORT = {("noisy", 1), ("tensors", 1), ("a generator", 1), ("arrays", 1)}
MARKS = dict.fromkeys(CASES, pytest.mark.long) | dict.fromkeys(SHORT, ()) | {("tensors", 2): pytest.mark.versions}
MARKED = [pytest.param(*case, marks=MARKS[case]) for case in CASES]
# Where it is stopped: in the midst of a later epoch, and at the end of one.
STOPS = {"late": {"steps": 12}, "between": {"epoch": 1}}


def train(
    directory, four_devices, make, *, steps=None, replicas=1, resume=False, extra=(), seed=5, at_once=1, **options
):
    if seed is not None:
        keras.utils.set_random_seed(seed)
    strategy = strategies.create("mirrored" if replicas > 1 else "one_device", devices=four_devices[:replicas])
    data = make(directory.parent)
    x, y = data if isinstance(data, tuple) else (data, None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=at_once)
    with Run(directory, recipe="test", resume=resume) as run:
        if y is not None:
            options["batch_size"] = BATCH
        run.fit(model, x, y, epochs=EPOCHS, steps_per_epoch=steps, callbacks=list(extra), **options)
        rows = (directory / "history.csv").read_text().splitlines()
        figures = [row.split(",")[:3] for row in rows]
        # Without replicas, Keras also counts the step in which it finds that data of unknown length have ended.
        # Of several steps in one call it counts none.
        unknown = isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.UNKNOWN_CARDINALITY and not steps
        ends = EPOCHS if unknown and replicas == at_once == 1 else 0
        assert int(model.optimizer.iterations) == run.summary["steps"] + ends
        return [weight.numpy() for weight in model.weights], {**run.summary, "figures": figures}


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Keras says so at the end of each epoch of data whose length it doesn't know.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("kind", "replicas"), MARKED)
def test_stopped_and_resumed_the_weights_are_those_of_an_undisturbed_run(tmp_path, four_devices, kind, replicas):
    make, steps = KINDS[kind]
    (tmp_path / "a").mkdir()
    undisturbed, summary = train(tmp_path / "a/run", four_devices, make, steps=steps, replicas=replicas)
    assert summary["steps"] == 15
    for name, stop in STOPS.items():
        (tmp_path / name).mkdir()
        with pytest.raises(StoppedBySignal):
            train(
                tmp_path / name / "run", four_devices, make, steps=steps, replicas=replicas, extra=[StopAfter(**stop)]
            )
        resumed, more = train(tmp_path / name / "run", four_devices, make, steps=steps, replicas=replicas, resume=True)
        assert more["steps"] == 15, name
        assert same(resumed, undisturbed), f"{kind}, stopped {name}"
        # Restored, a metric's sums are the first replica's: what they come to differs in the last digit.
        assert more["figures"][0] == summary["figures"][0]
        for mine, theirs in zip(more["figures"][1:], summary["figures"][1:], strict=True):
            exact = [float(value) for value in theirs]
            assert [float(v) for v in mine] == (exact if replicas == 1 else pytest.approx(exact, rel=1e-6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("changes", batteries.rows(["on_epoch_begin", "on_epoch_end"], "on_epoch_begin"))
@pytest.mark.parametrize("by", batteries.rows([1, -1], -1))
def test_data_whose_length_changes_with_each_epoch_goes_on_with_it(tmp_path, four_devices, caplog, by, changes):
    def make(_):
        return Growing(by, changes)

    undisturbed, summary = train(tmp_path / "a", four_devices, make, replicas=2)
    for name, stop in {"within": {"steps": 5}, "between": {"epoch": 1}}.items():
        with pytest.raises(StoppedBySignal):
            train(tmp_path / name, four_devices, make, replicas=2, extra=[StopAfter(**stop)])
        resumed, more = train(tmp_path / name, four_devices, make, replicas=2, resume=True)
        assert more["steps"] == summary["steps"], name
        assert same(resumed, undisturbed), name
    assert "uninterrupted" not in caplog.text


@pytest.mark.slow
def test_a_length_that_something_else_has_changed_is_said(tmp_path, four_devices, caplog):
    data = Growing(1, "on_epoch_end")
    lengthens = keras.callbacks.LambdaCallback(on_train_begin=lambda *_: setattr(data, "count", 9))
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "run", four_devices, lambda _: data, extra=[lengthens, StopAfter(epoch=1)])
    train(tmp_path / "run", four_devices, lambda _: Growing(1, "on_epoch_end"), resume=True)
    assert "The data has 6 batches now and had 11 at the checkpoint" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("kind", "steps", "made"),
    [
        ("unknown length", None, [5, 10, 15]),
        pytest.param("endless", 5, [6, 12, 18], marks=pytest.mark.long),
        pytest.param("tensors", 8, [5, 10, 15], marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_steps_that_are_made_at_once_are_counted_as_they_were_made(tmp_path, four_devices, kind, steps, made, replicas):
    """Keras's last call in an epoch makes two steps of three where the data ends, and three where two are left."""
    how = {"steps": steps, "replicas": replicas, "at_once": 3, "validation_data": (X, Y)}
    (tmp_path / "a").mkdir()
    undisturbed, summary = train(tmp_path / "a/run", four_devices, KINDS[kind][0], **how)
    assert [int(row[1]) for row in summary["figures"][1:]] == made
    for name, stop in {"first": {"validation": True}, "late": {"steps": 3}, "between": {"epoch": 1}}.items():
        (tmp_path / name).mkdir()
        with pytest.raises(StoppedBySignal):
            train(tmp_path / name / "run", four_devices, KINDS[kind][0], extra=[StopAfter(**stop)], **how)
        resumed, more = train(tmp_path / name / "run", four_devices, KINDS[kind][0], resume=True, **how)
        assert [int(row[1]) for row in more["figures"][1:]] == made
        assert same(resumed, undisturbed), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_it_goes_on_in_the_same_order_under_another_strategy(tmp_path, four_devices, before, after):
    (tmp_path / "a").mkdir()
    undisturbed, _ = train(tmp_path / "a/run", four_devices, tensors)
    (tmp_path / "b").mkdir()
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "b/run", four_devices, tensors, replicas=before, extra=[StopAfter(steps=7)])
    resumed, _ = train(tmp_path / "b/run", four_devices, tensors, replicas=after, resume=True)
    assert all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(resumed, undisturbed, strict=True))


@pytest.mark.slow
def test_a_saved_iterator_goes_on_even_where_nothing_was_seeded(tmp_path, four_devices):
    """Its shuffle buffer is part of the checkpoint, so every example is seen once in the epoch."""

    def numbered():
        numbers = tf.data.Dataset.range(COUNT).map(lambda n: tf.cast(n, tf.float32))
        return numbers.shuffle(COUNT).map(lambda n: (tf.fill([3], n), tf.fill([1], n))).batch(BATCH)

    class Sum(keras.metrics.Sum):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_true)

    def once(resume=False, extra=()):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Sum(name="n")])
        with Run(tmp_path / "run", recipe="test", resume=resume) as run:
            history = run.fit(model, numbered(), epochs=1, callbacks=list(extra))
            return history.history["n"][-1]

    with pytest.raises(StoppedBySignal):
        once(extra=[StopAfter(steps=2)])
    assert once(resume=True) == sum(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_stop_in_the_last_steps_of_an_epoch(tmp_path, four_devices, before):
    """Where batches have been read ahead to the data's end the state has no generator of shuffles."""

    def shuffled(folder):
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT).batch(BATCH).prefetch(3)

    steps = -(-COUNT // BATCH)
    weights, _ = train(tmp_path / "a", four_devices, shuffled)
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "b", four_devices, shuffled, extra=[StopAfter(steps=2 * steps - before)])
    again, _ = train(tmp_path / "b", four_devices, shuffled, resume=True)
    assert all(np.array_equal(*pair) for pair in zip(weights, again, strict=True))


@pytest.mark.slow
def test_data_that_is_shuffled_without_a_seed_and_read_again_is_said(tmp_path, four_devices, caplog):
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "run", four_devices, tensors, replicas=2, extra=[StopAfter(steps=12)])
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run", four_devices, tensors, replicas=2, resume=True, seed=6)
    assert "began with random seed 5 and resumes with 6" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_less_data_than_before_is_a_sentence(tmp_path, four_devices):
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "run", four_devices, generated, extra=[StopAfter(steps=12)])
    with pytest.raises(DataError, match="it has only 1"):
        train(tmp_path / "run", four_devices, lambda folder: generated(folder).take(1), resume=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_another_pipeline_than_the_saved_iterators_is_a_sentence(tmp_path, four_devices):
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "run", four_devices, tensors, extra=[StopAfter(steps=12)])
    with pytest.raises(DataError, match="that iterator reads <_PrefetchDataset"):
        train(tmp_path / "run", four_devices, lambda folder: tensors(folder).map(lambda x, y: (x, y, y)), resume=True)


@pytest.mark.slow
def test_a_model_that_waits_for_its_shapes_is_restored_too(tmp_path):
    def once(data, resume=False, extra=()):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with Run(tmp_path / "run", recipe="test", resume=resume) as run:
            run.fit(model, data, epochs=1, callbacks=list(extra))
            return [weight.numpy() for weight in model.weights]

    with pytest.raises(StoppedBySignal):
        once(tensors(tmp_path), extra=[StopAfter(steps=3)])
    assert len(once(tensors(tmp_path), resume=True)) == 4
    with pytest.raises(ModelError, match="keras.Input"):
        once(python_generator(tmp_path), resume=True)


@pytest.mark.slow
def test_the_examples_of_a_step_are_counted_where_the_data_does_not_say_them(tmp_path, four_devices):
    _, summary = train(tmp_path / "run", four_devices, tensors)
    assert summary["examples_per_second"] > 0
    assert summary["global_batch_size"] == BATCH
    assert CheckpointStore(tmp_path / "run/checkpoints").load().step == 15


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_draws_in_the_order_of_threads_are_said_before_the_first_epoch(tmp_path, four_devices, caplog, parallel):
    def make(_):
        def augment(x, y):
            return x + tf.random.normal(tf.shape(x)), y

        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return data.map(augment, num_parallel_calls=tf.data.AUTOTUNE if parallel else None).batch(BATCH)

    train(tmp_path / "run", four_devices, make)
    said = "augment draws random numbers for several examples at once, in the order of threads"
    assert (said in caplog.text) == parallel
