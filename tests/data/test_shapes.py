import numpy as np
import pytest

from toolkit.data import data_sets as shapes


def test_pictures_are_a_function_of_the_seed():
    images, labels = shapes.generate(300, seed=5)
    again, same = shapes.generate(300, seed=5)
    other, _ = shapes.generate(300, seed=6)
    assert images.shape == (300, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32
    assert np.array_equal(images, again)
    assert np.array_equal(labels, same)
    assert not np.array_equal(images, other)


@pytest.mark.parametrize("count", [0, 1, 37, 2050])
def test_any_size_with_all_classes_equally_often(count):
    images, labels = shapes.generate(count, seed=0)
    assert len(images) == len(labels) == count
    counts = np.bincount(labels, minlength=10)
    assert counts.max() - counts.min() <= 1


def test_training_and_test_pictures_differ():
    examples = shapes.load_shapes(train=500, test=500)
    train = {image.tobytes() for image in examples.train_images}
    assert not train & {image.tobytes() for image in examples.test_images}
    assert len(train) == 500
    assert len(examples.classes) == 10


@pytest.mark.long
@pytest.mark.slow
def test_a_linear_classifier_stays_below_60_percent():
    """Ridge regression onto one-hot labels, on all pixels and a constant: the best of several penalties."""
    examples = shapes.load_shapes(train=6000, test=2000)

    def features(images):
        flat = images.reshape(len(images), -1).astype(np.float32) / 255
        return np.concatenate([flat, np.ones((len(flat), 1), np.float32)], axis=1)

    train, test = features(examples.train_images), features(examples.test_images)
    targets = np.eye(10, dtype=np.float32)[examples.train_labels]
    gram, moment = train.T @ train, train.T @ targets
    accuracies = []
    for penalty in (1.0, 100.0, 10_000.0):
        weights = np.linalg.solve(gram + penalty * np.eye(len(gram), dtype=np.float32), moment)
        accuracies.append(np.mean(np.argmax(test @ weights, axis=1) == examples.test_labels))
    assert max(accuracies) < 0.60
