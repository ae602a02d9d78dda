"""Fails when Keras repairs `fit` under MultiWorkerMirroredStrategy itself, so that the cure can go."""

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
def test_fit_of_keras_still_needs_the_cure(tmp_path):
    with processes.group(["-c", PLAIN], [[], []], tmp_path) as group:
        group.wait(limit=90)
        said = "".join(group.outputs)
        assert "Attempt to convert a value (PerReplica" in said, (
            "Keras's fit no longer fails as it did under MultiWorkerMirroredStrategy (keras-team/keras#20585). "
            f"See whether MultiWorkerStrategy.reduce is still needed.\n{said[-3000:]}"
        )


@pytest.mark.slow
def test_the_cure_for_a_strategy_of_ones_own(tmp_path):
    mended = PLAIN.replace(
        "with strategy", "import toolkit\nstrategy = toolkit.strategies.enable_fit(strategy)\nwith strategy"
    )
    with processes.group(["-c", mended], [[], []], tmp_path) as group:
        group.succeed(limit=120)
