"""What being launched costs a training's steps: `toolkit launch` against the same script by hand.

    python -m benchmarks.launch_cost [--pairs=5]

A plain Keras script, whose model is so small that a step takes a millisecond, prints a line in ten of its 3,000 steps,
and says how long its `fit` took. Launched, steps are reported, and lines go through a pipe, the display and a log.
The two ways take turns; the figure is the median of the pairs' ratios. Target: nothing that can be measured.
"""

import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 5, "Pairs to run.", lower_bound=1)
ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import time, keras, numpy as np
class Lines(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch % 10 == 0:
            print("batch", batch, logs["loss"], flush=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.zeros((48000, 8), "float32")
model.fit(x[:160], x[:160, :1], batch_size=16, verbose=0)
began = time.perf_counter()
model.fit(x, x[:, :1], batch_size=16, verbose=0, callbacks=[Lines()])
print("SECONDS", time.perf_counter() - began, flush=True)
"""


def seconds(folder: str, *launcher: str) -> float:
    """Returns how long the script's `fit` took."""
    command = [sys.executable, *launcher, "train.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    found = re.search(r"SECONDS (\S+)", done.stdout)
    if found is None:
        raise RuntimeError(done.stdout[-1000:])
    return float(found[1])


def main() -> None:
    """Prints each pair and the median ratio."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "train.py").write_text(SCRIPT)
        for number in range(_PAIRS.value):
            ways = {"by hand": (), "launched": ("-m", "toolkit", "launch", "--workers=1")}
            order = list(ways) if number % 2 else list(reversed(ways))
            taken = {way: seconds(folder, *ways[way]) for way in order}
            ratios.append(taken["launched"] / taken["by hand"])
            print(
                f"by hand {taken['by hand']:.2f} s, launched {taken['launched']:.2f} s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"median of {_PAIRS.value}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    toolkit.cli.run(main)
