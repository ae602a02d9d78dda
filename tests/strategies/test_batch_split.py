"""Every example once, and no empty share, whatever the sizes."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit import devices
from toolkit.strategies import batches as division
from toolkit.strategies.batches import show
from toolkit.strategies.pipelines import in_order, untuned


def rows(parts):
    """Each part's examples, without copies."""
    return [np.asarray(part.batch[0]["x"])[: part.rows, 0].tolist() for part in parts]


def cut(examples, batch, count, indices=None):
    x = np.arange(examples, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, 0])).batch(batch)
    return [rows(division.split(dataset, indices=[n], count=count)) for n in (indices or range(count))]


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(examples=st.integers(1, 60), batch=st.integers(1, 20), count=st.integers(1, 5))
def test_every_example_is_in_one_share_of_its_own_batch(examples, batch, count):
    shares = cut(examples, batch, count)
    assert {len(share) for share in shares} == {-(-examples // batch)}, "not as many steps as batches"
    steps = [[row for share in step for row in share] for step in zip(*shares, strict=True)]
    assert steps == [list(range(start, min(start + batch, examples))) for start in range(0, examples, batch)]


@pytest.mark.slow
def test_shares_are_equal_to_within_one_and_the_first_has_an_example():
    for step in zip(*cut(64, 10, 3), *cut(64, 10, 5), strict=True):
        assert max(map(len, step[:3])) - min(map(len, step[:3])) <= 1
        assert max(map(len, step[3:])) - min(map(len, step[3:])) <= 1
        assert step[0]
        assert step[3]


def test_a_replica_without_examples_has_a_copy_of_one_that_counts_nothing():
    x = np.arange(2, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x)).batch(4)
    parts = list(division.split(dataset, indices=range(4), count=4))
    assert [int(part.rows) for part in parts] == [1, 1, 0, 0]
    assert [part.batch[0]["x"].numpy().tolist() for part in parts] == [[[0]], [[1]], [[1]], [[1]]]
    own = division.without_copies(division.split(dataset, indices=range(4), count=4))
    assert [batch[1].numpy().tolist() for batch in own] == [[[0]], [[1]], [], []]


def test_several_replicas_of_a_worker_take_their_shares_in_turn():
    x = np.arange(8, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x)).batch(4)
    assert rows(division.split(dataset, indices=[1, 3], count=4)) == [[1], [3], [5], [7]]


def test_an_endless_dataset_stays_known_as_endless():
    dataset = tf.data.Dataset.range(10).batch(4).repeat()
    shared = division.split(dataset, indices=[0], count=2)
    assert shared.cardinality() == tf.data.INFINITE_CARDINALITY
    assert [part.batch.numpy().tolist() for part in shared.take(4)] == [[0, 1], [4, 5], [8], [0, 1]]


@pytest.mark.parametrize(
    ("make", "dense", "expected"),
    [
        (lambda: tf.ragged.constant([[1], [2, 3], [], [4]]), lambda t: t.to_list(), [[], [4]]),
        (
            lambda: tf.sparse.eye(4),
            lambda t: tf.sparse.to_dense(t).numpy().tolist(),
            [[0, 0, 1, 0], [0, 0, 0, 1]],
        ),
        (lambda: tf.constant(["a", "b", "c", "d"]), lambda t: t.numpy().tolist(), [b"c", b"d"]),
    ],
    ids=["ragged", "sparse", "strings"],
)
def test_other_kinds_of_tensor_are_cut_too(make, dense, expected):
    dataset = tf.data.Dataset.from_tensor_slices(make()).batch(4)
    (part,) = division.split(dataset, indices=[1], count=2)
    assert dense(part.batch) == expected


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (lambda: tf.ragged.constant([[n] * (n % 3) for n in range(9)]), lambda t: t.to_list()),
        (lambda: tf.sparse.eye(9), lambda t: tf.sparse.to_dense(t).numpy().tolist()),
    ],
    ids=["ragged", "sparse"],
)
def test_a_share_of_any_kind_may_be_a_copy(make, dense):
    dataset = tf.data.Dataset.from_tensor_slices(make()).batch(4)  # Of 4, 4 and 1.
    parts = list(division.split(dataset, indices=[1], count=2))
    assert [int(part.rows) for part in parts] == [2, 2, 0]
    assert [row for part in parts for row in dense(part.batch)] == [dense(make())[n] for n in (2, 3, 6, 7, 8)]


def test_a_pydataset_of_keras_is_cut():
    class Squares(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return np.full((3, 1), number, np.float32), np.zeros(3, np.float32)

    adapter = keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter(Squares(), shuffle=False)
    shared = division.split(adapter.get_tf_dataset(), indices=[1], count=2)
    assert [part.batch[0].numpy().tolist() for part in shared] == [[[0]], [[1]]]


def test_elements_are_shown_and_iterators_can_be_saved(tmp_path):
    seen = []
    numbers = tf.data.Dataset.range(6).map(lambda n: {"n": n, "name": tf.strings.as_string(n)}).batch(2)
    shown = show(numbers, lambda index, *parts: seen.append([index, *(part.tolist() for part in parts)]))
    assert shown.cardinality() == 3
    assert shown.element_spec == numbers.element_spec
    batches = iter(shown)
    assert next(batches)["n"].numpy().tolist() == [0, 1]
    assert seen == [[0, [0, 1], [b"0", b"1"]]]
    path = tf.train.Checkpoint(it=batches).save(str(tmp_path / "of"))
    assert next(batches)["n"].numpy().tolist() == [2, 3]
    again = iter(shown)
    tf.train.Checkpoint(it=again).restore(path)
    assert [batch["n"].numpy().tolist() for batch in again] == [[2, 3], [4, 5]]
    assert seen[1:] == [[1, [2], [b"2"]], [1, [2], [b"2"]], [2, [4], [b"4"]]]


@pytest.mark.parametrize("count", [tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY])
def test_a_dataset_that_shows_its_elements_is_as_long_as_it_was(count):
    endless = tf.data.Dataset.range(2).repeat()
    dataset = endless if count == tf.data.INFINITE_CARDINALITY else endless.take(7).filter(lambda n: n >= 0)
    shown = show(dataset, lambda *_: None)
    assert shown.cardinality() == count
    assert len(list(shown.take(7))) == 7


def test_workers_read_in_order_whatever_the_options_say():
    def late(n):
        time.sleep(0.02 * (n == 0))
        return n

    options = tf.data.Options()
    options.deterministic = False
    numbers = tf.data.Dataset.range(8).map(lambda n: tf.numpy_function(late, [n], tf.int64), num_parallel_calls=4)
    assert [int(n) for n in in_order(numbers.with_options(options))] == list(range(8))


def test_without_tuning_autotune_means_as_many_calls_as_cores():
    options = untuned(tf.data.Dataset.range(3)).options().autotune
    assert (options.enabled, options.initial_parallelism) == (False, devices.cores())
    asked = tf.data.Options()
    asked.autotune.enabled = True
    assert untuned(tf.data.Dataset.range(3).with_options(asked)).options().autotune.enabled
