"""Two workers on loopback beside two logical devices of one process: what several processes cost.

    python -m benchmarks.two_workers [--pairs=3] [--steps=60] [--epochs=4]

Both train the small CNN from arrays by Keras's own `fit`, 128 pictures a step, a thread for each replica; the first
epoch isn't counted. The ways take turns; the figure is the median of the pairs' ratios of images per second, whole
epochs, and in brackets that of steps without the begin and the end of their epochs. Target: 0.9.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 3, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of an epoch.", lower_bound=2)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs that count.", lower_bound=1)
ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import json, sys, time
import tensorflow as tf
import toolkit
name, steps, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tf.config.threading.set_intra_op_parallelism_threads(1)
if name == "mirrored":
    devices = toolkit.devices.configure(gpus=2).logical_devices
    strategy = toolkit.strategies.create(name, devices=devices)
else:
    strategy = toolkit.strategies.create(name)
import keras, numpy as np
x = np.random.default_rng(0).integers(0, 255, (128 * steps, 32, 32, 3)).astype("uint8")
y = np.arange(128 * steps) % 10
with strategy.scope():
    model = toolkit.models.build("small_cnn", classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
class Times(keras.callbacks.Callback):
    whole, steps = [], []
    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.first = time.perf_counter()
        self.last = time.perf_counter()
    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            self.whole.append(time.perf_counter() - self.began)
            self.steps.append(self.last - self.first)
times = Times()
model.fit(x, y, batch_size=128, epochs=epochs + 1, callbacks=[times], verbose=0)
n = epochs * 128
print("RATES", json.dumps([n * steps / sum(times.whole), n * (steps - 1) / sum(times.steps)]), flush=True)
"""


def rates(folder: str, name: str) -> list[float]:
    """Returns images per second of whole epochs, and of steps alone."""
    launcher = ["-m", "toolkit", "launch", "--workers=2"] if name == "multi_worker" else []
    command = [sys.executable, *launcher, "train.py", name, str(_STEPS.value), str(_EPOCHS.value)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    found = re.search(r"RATES (\[.*\])", done.stdout)
    if found is None:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return json.loads(found[1])


def main() -> None:
    """Prints each pair and the median ratios."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "train.py").write_text(SCRIPT)
        for number in range(_PAIRS.value):
            order = ("mirrored", "multi_worker") if number % 2 else ("multi_worker", "mirrored")
            seen = {name: rates(folder, name) for name in order}
            ratios.append([one / other for one, other in zip(seen["multi_worker"], seen["mirrored"], strict=True)])
            print(
                f"two workers {seen['multi_worker'][0]:,.0f} images/s, two devices {seen['mirrored'][0]:,.0f}, "
                f"ratio {ratios[-1][0]:.2f} ({ratios[-1][1]:.2f})",
                flush=True,
            )
    whole, steps = ([ratio[part] for ratio in ratios] for part in range(2))
    print(
        f"median of {len(ratios)}: {statistics.median(whole):.2f} ({statistics.median(steps):.2f}), "
        f"{min(whole):.2f} to {max(whole):.2f}"
    )


if __name__ == "__main__":
    toolkit.cli.run(main)
