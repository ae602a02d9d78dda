"""Optimizer state in shards beside replicated: seconds of a step, and bytes of slots on each replica.

    python -m benchmarks.optimizer_state [--workers=4] [--rounds=7] [--steps=20]

Four replicas, devices of one process or, with --workers, processes on loopback; FC layers of 4.2 million weights, Adam,
16 examples each. Both models are trained by Keras's own `fit` in the same processes, in turn; the figure is the median
of the rounds' ratios of time per step. Targets: 1.05, and 0.26 of the bytes.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

import toolkit

_WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0 for four devices of one process.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each.", lower_bound=2)
_LAUNCHED = flags.DEFINE_boolean("launched", False, "Of a worker, which this benchmark starts itself.")
WIDTH, EXAMPLES = 1024, 64


def main() -> None:
    """Runs the pairs and prints each ratio."""
    if _WORKERS.value and not _LAUNCHED.value:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "toolkit", "launch", f"--workers={_WORKERS.value}", f"--log_dir={folder}"]
            command += ["-m", "benchmarks.optimizer_state", "--launched"]
            subprocess.run([*command, f"--rounds={_ROUNDS.value}", f"--steps={_STEPS.value}"], check=True, timeout=900)
        return
    devices = toolkit.devices.configure(gpus=1 if _LAUNCHED.value else 4, emulate="always")
    strategy = toolkit.strategies.create("auto", devices=devices.logical_devices)
    replicated, sharded = (Trained(strategy, state) for state in ("replicated", "sharded"))
    replicated.seconds(), sharded.seconds()  # Traces both.
    ratios = []
    for number in range(_ROUNDS.value):
        first, second = (replicated, sharded) if number % 2 else (sharded, replicated)
        took = {first: first.seconds(), second: second.seconds()}
        ratios.append(took[sharded] / took[replicated])
        if toolkit.strategies.is_chief(strategy):
            both = ", ".join(f"{1000 * took[each]:.1f}" for each in (replicated, sharded))
            print(f"round {number + 1}: {both} ms a step, ratio {ratios[-1]:.3f}", flush=True)
    if toolkit.strategies.is_chief(strategy):
        low, high = min(ratios), max(ratios)
        print(f"sharded / replicated: time {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), "
              f"slots {sharded.bytes / replicated.bytes:.4f}")  # fmt: skip


class Trained:
    """A model, of which each call trains some steps more."""

    def __init__(self, strategy: Any, state: str) -> None:
        import keras
        import numpy as np

        from toolkit.strategies.options import Options, set_options

        set_options(strategy, Options(optimizer_state=state))
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
            self.model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
            self.model.compile(keras.optimizers.Adam(1e-4), "mse")
            self.model.optimizer.build(self.model.trainable_variables)
        slots = [v for v in self.model.optimizer.variables if len(v.shape)]
        self.bytes = sum(4 * int(np.prod(getattr(v, "shard_shape", v.shape))) for v in slots)
        random = np.random.default_rng(0)
        self.x = random.normal(size=(EXAMPLES * _STEPS.value, WIDTH)).astype("float32")

    def seconds(self) -> float:
        """Trains, and returns the seconds of a step, from the first one's end to the last one's."""
        import keras

        ends: list[float] = []
        each = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())  # noqa: ARG005 - Keras's names.
        )
        self.model.fit(self.x, self.x[:, :10], batch_size=EXAMPLES, verbose=0, shuffle=False, callbacks=[each])
        return (ends[-1] - ends[0]) / (len(ends) - 1)


if __name__ == "__main__":
    toolkit.cli.run(main)
