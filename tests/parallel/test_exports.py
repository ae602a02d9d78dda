"""What leaves a model with sharded layers is whole: an exported model, and TensorFlow's own checkpoints."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.parallel import ShardedConv2D, ShardedDense

IMAGES = np.random.default_rng(0).normal(size=(14, 6, 6, 3)).astype("float32")
LABELS = np.arange(14) % 5


def built(conv=ShardedConv2D, first=ShardedDense, **pair):
    layers = keras.layers
    second = ShardedDense(7, split="inputs") if pair else layers.Dense(7)
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            conv(5, 3, activation="relu"),
            layers.Flatten(),
            first(9, activation="relu", **pair),
            second,
            layers.Dense(5),
        ]
    )


@pytest.fixture
def trained(four_devices):
    keras.utils.set_random_seed(3)
    strategy = strategies.create("mirrored", devices=four_devices[:3])
    with strategy.scope():
        model = built(keep_split=True)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(IMAGES, LABELS, batch_size=7, verbose=0)
    return model


@pytest.mark.slow
def test_an_exported_model_answers_as_the_one_that_was_trained(trained, tmp_path):
    expected = trained.predict(IMAGES, verbose=0)
    trained.export(tmp_path / "it is", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "it is")
    np.testing.assert_allclose(loaded.serve(IMAGES), expected, atol=1e-6)
    trained.fit(IMAGES, LABELS, batch_size=7, verbose=0)  # It is sharded as before.
    assert np.abs(trained.predict(IMAGES, verbose=0) - expected).max() > 1e-5


@pytest.mark.slow
def test_tensorflow_s_checkpoints_hold_whole_weights(trained, tmp_path):
    expected = trained.predict(IMAGES, verbose=0)
    weights, slots = trained.get_weights(), [np.array(v) for v in trained.optimizer.variables]
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    path = checkpoint.save(tmp_path / "it")
    trained.fit(IMAGES, LABELS, batch_size=7, verbose=0)
    checkpoint.restore(path).assert_consumed()
    for mine, theirs in zip(trained.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(trained.optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(np.array(mine), theirs)
    plain = built(keras.layers.Conv2D, keras.layers.Dense)
    tf.train.Checkpoint(model=plain).restore(path).assert_existing_objects_matched()
    np.testing.assert_allclose(plain.predict(IMAGES, verbose=0), expected, atol=1e-6)


@pytest.mark.slow
def test_who_would_write_a_first_shard_is_told(trained, tmp_path):
    with pytest.raises(StrategyError, match="Use model.export"):
        tf.saved_model.save(trained, tmp_path / "it")
