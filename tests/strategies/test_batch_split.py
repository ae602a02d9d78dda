"""Every example once, and no replica without one, whatever the sizes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit import devices
from toolkit.strategies.input import batch_split
from toolkit.strategies.input.first_batch import show_first
from toolkit.strategies.input.pipelines import untuned


def rows(dataset):
    return [np.asarray(element[0]["x"])[:, 0].tolist() for element in dataset]


def cut(examples, batch, count, indices=None):
    x = np.arange(examples, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, 0])).batch(batch)
    return [rows(batch_split.split(dataset, indices=[n], count=count)) for n in (indices or range(count))]


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(examples=st.integers(1, 60), batch=st.integers(1, 20), count=st.integers(1, 5))
def test_every_example_is_in_one_share_and_no_share_is_empty(examples, batch, count):
    if (batch < count and examples > batch) or examples < count:
        return
    shares = cut(examples, batch, count)
    assert len({len(share) for share in shares}) == 1, "the replicas would not take the same number of steps"
    assert all(share for replica in shares for share in replica)
    together = [row for step in zip(*shares, strict=True) for share in step for row in share]
    assert together == list(range(examples)), "an example is lost, doubled or out of order"


@pytest.mark.slow
def test_shares_are_equal_to_within_one():
    for step in zip(*cut(64, 10, 3), strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1


@pytest.mark.slow
def test_a_small_last_batch_borrows_from_the_one_before():
    first, second = cut(9, 4, 2)
    assert list(map(len, first)) == [2, 1, 1]
    assert list(map(len, second)) == [2, 2, 1]


@pytest.mark.slow
def test_where_there_is_nothing_to_borrow_two_batches_become_one():
    assert [len(replica) for replica in cut(5, 4, 4)] == [1, 1, 1, 1]


def test_fewer_examples_than_replicas_are_said():
    with pytest.raises(tf.errors.InvalidArgumentError, match="too few examples for 3 replicas"):
        cut(2, 4, 3)


def test_several_replicas_of_a_worker_take_their_shares_in_turn():
    x = np.arange(8, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x)).batch(4)
    assert rows(batch_split.split(dataset, indices=[1, 3], count=4)) == [[1], [3], [5], [7]]


def test_an_endless_dataset_stays_known_as_endless():
    dataset = tf.data.Dataset.range(10).batch(4).repeat()
    shared = batch_split.split(dataset, indices=[0], count=2)
    assert shared.cardinality() == tf.data.INFINITE_CARDINALITY
    assert [batch.numpy().tolist() for batch in shared.take(4)] == [[0, 1], [4, 5], [8], [0, 1]]


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
    (share,) = batch_split.split(dataset, indices=[1], count=2)
    assert dense(share) == expected


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (lambda: tf.ragged.constant([[n] * (n % 3) for n in range(9)]), lambda t: t.to_list()),
        (lambda: tf.sparse.eye(9), lambda t: tf.sparse.to_dense(t).numpy().tolist()),
    ],
    ids=["ragged", "sparse"],
)
def test_a_last_batch_of_any_kind_borrows(make, dense):
    dataset = tf.data.Dataset.from_tensor_slices(make()).batch(4)  # Of 4, 4 and 1.
    both = [list(batch_split.split(dataset, indices=[index], count=2)) for index in (0, 1)]
    assert [(len(dense(a)), len(dense(b))) for a, b in zip(*both, strict=True)] == [(2, 2), (1, 2), (1, 1)]
    assert [row for pair in zip(*both, strict=True) for part in pair for row in dense(part)] == dense(make())


def test_a_last_batch_that_was_padded_borrows_from_one_with_longer_examples():
    def examples():
        yield from ([n] * n for n in (5, 2, 3, 6, 1))

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([None], tf.int64))
    dataset = dataset.padded_batch(2, padding_values=tf.constant(-1, tf.int64)).prefetch(1)
    both = [list(batch_split.split(dataset, indices=[index], count=2).as_numpy_iterator()) for index in (0, 1)]
    # The last example alone is too few for two, and so is what it would leave of the batch before: both become one.
    assert [each[-1].tolist() for each in both] == [[[3, 3, 3, -1, -1, -1]], [[6] * 6, [1, -1, -1, -1, -1, -1]]]


def test_examples_that_are_not_batched_are_told_apart():
    assert not batch_split.is_batched(tf.data.Dataset.range(3))
    assert batch_split.is_batched(tf.data.Dataset.range(3).batch(2))


def test_a_pydataset_of_keras_is_cut():
    class Squares(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return np.full((3, 1), number, np.float32), np.zeros(3, np.float32)

    adapter = keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter(Squares(), shuffle=False)
    shared = batch_split.split(adapter.get_tf_dataset(), indices=[1], count=2)
    assert [element[0].numpy().tolist() for element in shared] == [[[0], [0]], [[1], [1]]]


def test_the_first_element_is_shown_once_and_iterators_can_be_saved(tmp_path):
    seen = []
    numbers = tf.data.Dataset.range(6).map(lambda n: {"n": n, "name": tf.strings.as_string(n)}).batch(2)
    shown = show_first(numbers, lambda *parts: seen.append([part.tolist() for part in parts]))
    assert shown.cardinality() == 3
    assert shown.element_spec == numbers.element_spec
    batches = iter(shown)
    assert next(batches)["n"].numpy().tolist() == [0, 1]
    assert seen == [[[0, 1], [b"0", b"1"]]]
    path = tf.train.Checkpoint(it=batches).save(str(tmp_path / "of"))
    assert next(batches)["n"].numpy().tolist() == [2, 3]
    again = iter(shown)
    tf.train.Checkpoint(it=again).restore(path)
    assert [batch["n"].numpy().tolist() for batch in again] == [[2, 3], [4, 5]]
    assert len(seen) == 1


@pytest.mark.parametrize("count", [tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY])
def test_a_dataset_that_shows_its_first_element_is_as_long_as_it_was(count):
    endless = tf.data.Dataset.range(2).repeat()
    dataset = endless if count == tf.data.INFINITE_CARDINALITY else endless.take(7).filter(lambda n: n >= 0)
    shown = show_first(dataset, lambda _: None)
    assert shown.cardinality() == count
    assert len(list(shown.take(7))) == 7


def test_without_tuning_autotune_means_as_many_calls_as_cores():
    options = untuned(tf.data.Dataset.range(3)).options().autotune
    assert (options.enabled, options.initial_parallelism) == (False, devices.cores())
    asked = tf.data.Options()
    asked.autotune.enabled = True
    assert untuned(tf.data.Dataset.range(3).with_options(asked)).options().autotune.enabled
