"""What a first step costs: several devices by this toolkit, and by TensorFlow's strategy alone.

    python -m benchmarks.first_step [--pairs=3] [--devices=2,4]

Both train MobileNetV2, with its 52 batch normalisations, for one step on devices of the CPU; each in its own process,
in turn. The figure is the processor time of `fit`: nearly all of it is tracing, and what TensorFlow makes of the graph.
The toolkit's step is one device's, so each normalisation is one exchange more forward and one backward.
"""

import os
import statistics
import subprocess
import sys
import time

from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 3, "Pairs to run.", lower_bound=1)
_DEVICES = flags.DEFINE_list("devices", ["2", "4"], "Numbers of devices.")
_WAY = flags.DEFINE_enum("way", None, ["toolkit", "TensorFlow"], "One way, which is measured here.")


def main() -> None:
    """Runs the pairs and prints each ratio."""
    if _WAY.value is not None:
        _measure(int(_DEVICES.value[0]))
        return
    for count in _DEVICES.value:
        ratios = []
        for _ in range(_PAIRS.value):
            ours, theirs = (_measured(way, count) for way in ("toolkit", "TensorFlow"))
            ratios.append(ours / theirs)
            print(f"{count} devices: {ours:.1f} s and {theirs:.1f} s, ratio {ratios[-1]:.2f}", flush=True)
        print(f"{count} devices, median of {len(ratios)} pairs: {statistics.median(ratios):.2f}", flush=True)


def _measured(way: str, count: str) -> float:
    command = [sys.executable, "-m", "benchmarks.first_step", f"--way={way}", f"--devices={count}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, check=True, timeout=1800, env=environment, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def _measure(count: int) -> None:
    devices = toolkit.devices.configure(gpus=count, emulate="always").logical_devices
    import keras
    import numpy as np
    import tensorflow as tf

    if _WAY.value == "toolkit":
        strategy = toolkit.strategies.create("mirrored", devices=devices)
    else:
        strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = keras.applications.MobileNetV2(input_shape=(32, 32, 3), weights=None, classes=10)
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    batch = 4 * count
    pictures = np.random.default_rng(0).normal(size=(batch, 32, 32, 3)).astype("float32")
    began = time.process_time()
    model.fit(pictures, np.zeros(batch, "int64"), batch_size=batch, verbose=0)
    print(time.process_time() - began)


if __name__ == "__main__":
    toolkit.cli.run(main)
