import gc
import weakref

import numpy as np
import pytest

from toolkit import strategies
from toolkit.data import Batches
from toolkit.data.data_sets import load_shapes
from toolkit.data.pipeline import Examples, evaluation_batch_size
from toolkit.errors import DataError


def numbered(train, test):
    """Examples whose label is their number and whose every pixel tells it."""

    def images(count):
        return np.broadcast_to(np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1), (count, 32, 32, 3)).copy()

    return Examples(
        name="numbered",
        origin="test",
        classes=("a",),
        train_images=images(train),
        train_labels=np.arange(train, dtype=np.int32),
        test_images=images(test),
        test_labels=np.arange(test, dtype=np.int32),
    )


@pytest.fixture
def batches(four_devices):
    def make(replicas=1, train=100, test=50, size=12, **arguments):
        strategy = strategies.create("mirrored", devices=four_devices[:replicas])
        return Batches(examples=numbered(train, test), strategy=strategy, global_batch_size=size, **arguments)

    return make


def rows(batches, elements):
    """Labels of each global batch, replicas' shares joined."""
    local = batches.strategy.experimental_local_results
    return [np.concatenate([part.numpy() for part in local(labels)]) for _, labels in elements]


def take(batches, count, start_step=0):
    iterator = iter(batches.train(start_step))
    return rows(batches, [next(iterator) for _ in range(count)])


def test_an_epoch_sees_every_example_at_most_once_and_the_next_one_another_order(batches):
    cut = batches(train=100, size=10)
    epochs = np.reshape(take(cut, 20), (2, 100))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert np.mean(epochs[0] == epochs[1]) < 0.1
    assert np.mean(np.abs(np.diff(epochs[0])) == 1) < 0.1


def test_the_remainder_sits_out_an_epoch_not_every_epoch(batches):
    cut = batches(train=100, size=12)
    assert cut.steps_per_epoch == 8
    seen = np.reshape(take(cut, 8 * 6), (6, 96))
    assert all(len(set(epoch)) == 96 for epoch in seen)
    assert set(seen.ravel()) == set(range(100))


def test_a_stream_starts_at_any_step(batches):
    cut = batches()
    assert np.array_equal(take(cut, 5, start_step=11), take(cut, 16)[11:])


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_any_number_of_replicas_sees_the_same_batches(batches, replicas):
    assert np.array_equal(take(batches(replicas), 20), take(batches(1), 20))


@pytest.mark.parametrize("replicas", [2, 4])
def test_augmentation_depends_on_seed_and_step_alone(batches, replicas):
    def pictures(replicas, seed=3):
        cut = batches(replicas, seed=seed)
        images, _ = next(iter(cut.train(7)))
        return np.concatenate([part.numpy() for part in cut.strategy.experimental_local_results(images)])

    assert np.array_equal(pictures(replicas), pictures(1))
    assert not np.array_equal(pictures(1, seed=3), pictures(1, seed=4))


def test_augmentation_crops_and_mirrors(four_devices):
    examples = load_shapes(train=64, test=10)
    strategy = strategies.create("mirrored", devices=four_devices[:1])

    def pictures(augment):
        cut = Batches(examples=examples, strategy=strategy, global_batch_size=64, augment=augment)
        images, labels = next(iter(cut.train_dataset()))
        return images.numpy(), labels.numpy()

    (plain, labels), (changed, same_labels) = pictures(False), pictures(True)
    assert np.array_equal(labels, same_labels)
    padded = np.pad(plain, ((0, 0), (2, 2), (2, 2), (0, 0)))
    found = set()
    for number, picture in enumerate(changed):
        matches = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            if np.array_equal(
                picture, padded[number, down : down + 32, right : right + 32][:, :: -1 if mirrored else 1]
            )
        ]
        assert matches, f"picture {number} is no crop of its original"
        found.add(matches[0])
    assert len({m[:2] for m in found}) > 10
    assert {m[2] for m in found} == {False, True}


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("test", [50, 48, 49, 37, 13, 4])
def test_every_test_example_counts_once_and_no_replica_goes_without(batches, replicas, test):
    cut = batches(replicas, test=test)
    elements = list(cut.test())
    assert np.concatenate(rows(cut, elements)).tolist() == list(range(test))
    for _, labels in elements:
        assert all(len(part) for part in cut.strategy.experimental_local_results(labels))


def test_the_evaluation_batch_is_the_largest_that_fits():
    assert evaluation_batch_size(10_000, 128, 4) == 128
    assert evaluation_batch_size(257, 128, 2) == 127
    assert evaluation_batch_size(4, 128, 4) == 4


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"size": 0}, "Give 3 or more"),
        ({"size": -6}, "Give 3 or more"),
        ({"size": 13}, "Give 12 or 15"),
        ({"size": 2}, "Give 3"),
        ({"size": 300}, "at most 99"),
        ({"test": 2}, "at least 3 test examples"),
    ],
)
def test_a_batch_that_can_not_be_cut_is_refused(batches, arguments, word):
    with pytest.raises(DataError, match=word):
        batches(3, **arguments)


def test_sharding_order_and_tuning_are_stated(batches):
    import tensorflow as tf

    for dataset in (batches().train_dataset(), batches().test_dataset()):
        options = dataset.options()
        assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.DATA
        assert options.deterministic is True
        assert options.autotune.enabled is False


def test_batches_that_are_dropped_leave_no_pictures(batches):
    """As in a tuner's loop: each would keep all pictures, 82 MB of CIFAR-10's."""
    made = batches()
    take(made, 2)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
