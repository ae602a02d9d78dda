"""A strategy that the user made learns to work with Keras's fit."""

import processes
import pytest

PLAIN = """
import numpy, keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((16, 3)), numpy.ones((16, 1)), batch_size=4, verbose=0)
"""


@pytest.mark.slow
def test_the_cure_for_a_strategy_of_ones_own(tmp_path):
    mended = PLAIN.replace(
        "with strategy", "import toolkit\nstrategy = toolkit.strategies.enable_fit(strategy)\nwith strategy"
    )
    with processes.group(["-c", mended], [[], []], tmp_path) as group:
        group.succeed(limit=120)
