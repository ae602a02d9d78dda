"""Workers that train by themselves and average every so many steps go on, each with an optimizer of its own."""

import processes
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import json, os, sys
import keras, numpy as np
import toolkit
from toolkit.strategies import LocalSteps

strategy = toolkit.strategies.create("multi_worker", local=LocalSteps(every=4))
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 6 and sys.argv[1] == "fail" and os.environ["TOOLKIT_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
            os._exit(9)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
with toolkit.training.Run("run " + sys.argv[1], resume="auto", checkpoint_steps=3) as run:
    run.fit(model, x, x[:, :1], batch_size=8, epochs=2, shuffle=False, callbacks=[Fails()])
print("SEEN", json.dumps([weight.tolist() for weight in model.get_weights()]))
"""


def test_a_job_that_failed_between_two_averages_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    undisturbed = processes.seen(processes.launch(tmp_path, "train.py", "run"))
    failed = processes.launch(tmp_path, "--max_restarts=1", "train.py", "fail", limit=250)
    assert "starting the job again, restart 1 of 1" in failed.stdout
    assert processes.seen(failed) == undisturbed
    assert undisturbed[0] == undisturbed[1]
