"""BatchNormalization of the whole batch beside each replica's own share: the time of a step.

    python -m benchmarks.batch_statistics [--workers=2] [--rounds=3] [--steps=20] [--layers=3,18]

Two replicas, devices of one process or, with --workers, processes on loopback; convolutions of 32 filters on pictures
of 32 x 32, each with its normalisation, 64 pictures a batch. Both models are trained by Keras's own `fit` in the same
processes, in turn; the figure is the median of the rounds' ratios of time per step. Targets: 1.04 with three layers
and 1.10 with eighteen on two devices; 1.10 and 1.25 on two workers.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

import toolkit

_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0 for two devices of one process.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each.", lower_bound=2)
_LAYERS = flags.DEFINE_list("layers", ["3", "18"], "Numbers of layers, with a comma.")
_LAUNCHED = flags.DEFINE_boolean("launched", False, "Of a worker, which this benchmark starts itself.")
SIZE, FILTERS, EXAMPLES = 32, 32, 64


def main() -> None:
    """Runs the pairs and prints each ratio."""
    if _WORKERS.value and not _LAUNCHED.value:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "toolkit", "launch", f"--workers={_WORKERS.value}", f"--log_dir={folder}"]
            command += ["-m", "benchmarks.batch_statistics", "--launched", f"--layers={','.join(_LAYERS.value)}"]
            subprocess.run([*command, f"--rounds={_ROUNDS.value}", f"--steps={_STEPS.value}"], check=True, timeout=900)
        return
    devices = toolkit.devices.configure(gpus=1 if _LAUNCHED.value else 2, emulate="always")
    strategy = toolkit.strategies.create("auto", devices=devices.logical_devices)
    for layers in map(int, _LAYERS.value):
        batch, replica = (Trained(strategy, layers, kind) for kind in ("batch", "replica"))
        batch.seconds(), replica.seconds()  # Traces both.
        ratios = []
        for number in range(_ROUNDS.value):
            first, second = (batch, replica) if number % 2 else (replica, batch)
            took = {first: first.seconds(), second: second.seconds()}
            ratios.append(took[batch] / took[replica])
            if toolkit.strategies.is_chief(strategy):
                both = ", ".join(f"{1000 * took[each]:.1f}" for each in (batch, replica))
                print(f"{layers} layers, round {number + 1}: {both} ms a step, ratio {ratios[-1]:.3f}", flush=True)
        if toolkit.strategies.is_chief(strategy):
            low, high = min(ratios), max(ratios)
            print(f"{layers} layers, batch / replica: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


class Trained:
    """A model, of which each call trains some steps more."""

    def __init__(self, strategy: Any, layers: int, kind: str) -> None:
        import keras
        import numpy as np

        from toolkit.strategies.options import Options, set_options

        self._strategy, self._options = strategy, Options(batch_statistics=kind)
        self._set_options = set_options
        keras.utils.set_random_seed(1)
        parts = [keras.Input((SIZE, SIZE, 3))]
        for _ in range(layers):
            parts.append(keras.layers.Conv2D(FILTERS, 3, padding="same", use_bias=False))
            parts += [keras.layers.BatchNormalization(), keras.layers.ReLU()]
        with strategy.scope():
            self.model = keras.Sequential([*parts, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(keras.optimizers.SGD(0.01), loss)
        random = np.random.default_rng(0)
        self.x = random.normal(size=(EXAMPLES * _STEPS.value, SIZE, SIZE, 3)).astype("float32")
        self.y = np.arange(len(self.x)) % 10

    def seconds(self) -> float:
        """Trains, and returns the seconds of a step, from the first one's end to the last one's."""
        import keras

        ends: list[float] = []
        each = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())  # noqa: ARG005 - Keras's names.
        )
        self._set_options(self._strategy, self._options)
        self.model.fit(self.x, self.y, batch_size=EXAMPLES, verbose=0, shuffle=False, callbacks=[each])
        return (ends[-1] - ends[0]) / (len(ends) - 1)


if __name__ == "__main__":
    toolkit.cli.run(main)
