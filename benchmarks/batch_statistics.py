"""BatchNormalization of the whole batch beside each replica's own share: the time of a step, and processor time.

    python -m benchmarks.batch_statistics [--workers=2] [--rounds=3] [--steps=20] [--layers=3,18]

Two replicas, devices of one process or, with --workers, processes on loopback; convolutions of 32 filters on pictures
of 32 x 32, each with its normalisation, 64 pictures a batch. Both models are trained by Keras's own `fit` in the same
processes, in turn; the figure is the median of the rounds' ratios of time per step, and in brackets that of this
process's processor time. Targets: 1.04 with three layers and 1.10 with eighteen on two devices; 1.10 and 1.25 on two
workers.
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
            ratios.append([one / other for one, other in zip(took[batch], took[replica], strict=True)])
            if toolkit.strategies.is_chief(strategy):
                both = ", ".join(f"{1000 * took[each][0]:.1f}" for each in (batch, replica))
                whole, processor = ratios[-1]
                print(
                    f"{layers} layers, round {number + 1}: {both} ms a step, ratio {whole:.3f} ({processor:.3f})",
                    flush=True,
                )
        if toolkit.strategies.is_chief(strategy):
            found = (f"{statistics.median(x):.3f} from {min(x):.3f} to {max(x):.3f}" for x in zip(*ratios, strict=True))
            print(f"{layers} layers, batch / replica: time {next(found)}, processor time {next(found)}", flush=True)


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

    def seconds(self) -> tuple[float, float]:
        """Trains, and returns a step's seconds, and those of a processor, from the first step's end on."""
        import keras

        ends: list[tuple[float, float]] = []
        each = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(  # noqa: ARG005 - Keras's names.
                (time.perf_counter(), time.process_time())
            )
        )
        self._set_options(self._strategy, self._options)
        self.model.fit(self.x, self.y, batch_size=EXAMPLES, verbose=0, shuffle=False, callbacks=[each])
        whole, processor = ((last - first) / (len(ends) - 1) for first, last in zip(ends[0], ends[-1], strict=True))
        return whole, processor


if __name__ == "__main__":
    toolkit.cli.run(main)
