"""A model that trains with optimizers of its own, as a GAN does: a resumed run goes on with the state of each."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StoppedBySignal
from toolkit.strategies.variables.model_optimizers import optimizers_of
from toolkit.training import Run
from toolkit.training.checkpoints import state


class Pair(keras.Model):
    """Two networks, each with its optimizer."""

    def __init__(self):
        super().__init__()
        layers = ([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)] for _ in range(2))
        self.networks = [keras.Sequential(own) for own in layers]
        self.kept = {"first": keras.optimizers.Adam(0.01), "second": keras.optimizers.SGD(0.1, momentum=0.9)}
        self.total = keras.metrics.Mean(name="loss")

    metrics = property(lambda self: [self.total])

    def call(self, x):
        return self.networks[0](x) + self.networks[1](x)

    def train_step(self, data):
        x, y = data
        for network, optimizer in zip(self.networks, self.kept.values(), strict=True):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(network(x) - y))
            gradients = tape.gradient(loss, network.trainable_weights)
            optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
        self.total.update_state(loss)
        return {"loss": self.total.result()}


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise StoppedBySignal(15, step=None)


UNUSED = re.compile(r"optimizer/\d+|trains/0").fullmatch  # Keras builds the one of `compile` here and there.
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")


def trained(folder, strategy, *callbacks, resume=False):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Pair()
        model.compile()
    model(X[:1])
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
    with Run(folder, recipe="test", resume=resume, checkpoint_steps=2) as run:
        run.fit(model, data, epochs=2, callbacks=callbacks)
    return model


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, four_devices, replicas):
    strategy = strategies.create("auto", devices=four_devices[:replicas])
    whole = trained(tmp_path / "whole", strategy)
    with pytest.raises(StoppedBySignal):
        trained(tmp_path / "run", strategy, StopAt(3))
    resumed = trained(tmp_path / "run", strategy, resume=True)
    assert [int(optimizer.iterations.numpy()) for optimizer in optimizers_of(resumed)[1:]] == [12, 12]
    one, other = ({n: a for n, a in state.capture(m).items() if not UNUSED(n)} for m in (whole, resumed))
    assert list(one) == list(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)
