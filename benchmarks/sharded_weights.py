"""Weights in shards beside replicated ones, two workers: seconds of a step on loopback, and bytes between two hosts.

    python -m benchmarks.sharded_weights [--rounds=7] [--steps=6]
    sudo python -m benchmarks.sharded_weights --bytes [--rate=1gbit]

Time: 64 examples of a decoder block of 512 features, in which arithmetic dominates, SGD with momentum. Both models are
trained by Keras's own `fit` in the same processes, in turn; the figures are medians of the rounds' ratios, of time and
of processor time, which others on the machine disturb less. Target: 1.25.

Bytes: dense layers, four examples, on two network namespaces, as their interfaces count them; of steps with and without
more layers the difference, so that what a step exchanges besides doesn't count. Targets: 1.5 times those of replicated
weights; 1.0 in mixed precision, of which weights are gathered in 16 bits and gradients summed in 32.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

import toolkit
from benchmarks.namespaces import measured_on, received, two_hosts

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 6, "Steps of each.", lower_bound=2)
_BYTES = flags.DEFINE_boolean("bytes", False, "Bytes between two hosts, in the place of time.")
_RATE = flags.DEFINE_string("rate", "1gbit", "Of the hosts' link, as tc writes it.")
_LAUNCHED = flags.DEFINE_boolean("launched", False, "Of a worker on loopback, which this benchmark starts itself.")
_RANK = flags.DEFINE_integer("rank", None, "Of a host's worker, which this benchmark starts itself.")
_ADDRESSES = flags.DEFINE_list("addresses", [], "Of a host's worker: of both.")
_OUT = flags.DEFINE_string("out", None, "Of a host's worker: where its figures go.")
_WAY = flags.DEFINE_enum("way", "replicated", ["replicated", "sharded"], "Of a host's worker: how weights lie.")
_POLICY = flags.DEFINE_enum("policy", "float32", ["float32", "mixed_bfloat16"], "Of a host's worker.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Of a host's worker: how many there are.")
EXAMPLES, LENGTH, WIDTH, HEADS = 64, 64, 512, 8
WARM, LIMIT = 3, 200


def main() -> None:
    """Prints each round's ratio and their median, or a line for each way."""
    if _RANK.value is not None:
        pathlib.Path(_OUT.value).write_text(json.dumps(_worker()))
    elif _LAUNCHED.value:
        _pairs()
    elif _BYTES.value:
        _bytes()
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "toolkit", "launch", "--workers=2", f"--log_dir={folder}"]
            command += ["-m", "benchmarks.sharded_weights", "--launched"]
            # One core for each, of which a step's other thread is the network's.
            threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
            more = [f"--rounds={_ROUNDS.value}", f"--steps={_STEPS.value}"]
            subprocess.run([*command, *more], check=True, timeout=1800, env={**os.environ, **threads})


def _pairs() -> None:
    devices = toolkit.devices.configure(gpus=1, emulate="always")
    strategy = toolkit.strategies.create("auto", devices=devices.logical_devices)
    replicated, sharded = (Trained(strategy, way) for way in ("replicated", "sharded"))
    replicated.seconds(), sharded.seconds()  # Traces both.
    ratios: list[tuple[float, ...]] = []
    for number in range(_ROUNDS.value):
        first, second = (replicated, sharded) if number % 2 else (sharded, replicated)
        took = {first: first.seconds(), second: second.seconds()}
        ratios.append(tuple(mine / whole for mine, whole in zip(took[sharded], took[replicated], strict=True)))
        if toolkit.strategies.is_chief(strategy):
            both = ", ".join(f"{1000 * took[each][0]:.0f}" for each in (replicated, sharded))
            print(f"round {number + 1}: {both} ms a step, ratios {ratios[-1][0]:.3f}, {ratios[-1][1]:.3f}", flush=True)
    if toolkit.strategies.is_chief(strategy):
        for what, each in zip(("time", "processor time"), zip(*ratios, strict=True), strict=True):
            print(f"sharded / replicated: {what} {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})")


class Trained:
    """A model, of which each call trains some steps more."""

    def __init__(self, strategy: Any, way: str) -> None:
        import keras
        import numpy as np

        self.strategy, self.way = strategy, way
        keras.utils.set_random_seed(1)
        with self._as_it_lies(), strategy.scope():
            self.model = _block(keras)
            self.model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
        self.x = np.random.default_rng(0).normal(size=(EXAMPLES * _STEPS.value, LENGTH, WIDTH)).astype("float32")

    @contextlib.contextmanager
    def _as_it_lies(self):
        from toolkit.strategies.options import options_of, set_options

        before = options_of(self.strategy)
        set_options(self.strategy, dataclasses.replace(before, weights=self.way))
        try:
            yield
        finally:
            set_options(self.strategy, before)

    def seconds(self) -> tuple[float, float]:
        """Trains, and returns a step's seconds and processor seconds, from the first one's end to the last one's."""
        import keras

        ends: list[tuple[float, float]] = []
        each = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append((time.perf_counter(), time.process_time()))  # noqa: ARG005 - Keras's names.
        )
        with self._as_it_lies():
            self.model.fit(self.x, self.x[:, 0, :1], batch_size=EXAMPLES, verbose=0, shuffle=False, callbacks=[each])
        wall, own = ((last - first) / (len(ends) - 1) for first, last in zip(ends[0], ends[-1], strict=True))
        return wall, own


def _block(keras: Any) -> Any:
    layers = keras.layers
    given = keras.Input((LENGTH, WIDTH))
    y = layers.LayerNormalization()(given)
    x = given + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
    y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(given, layers.Dense(1)(layers.GlobalAveragePooling1D()(x + layers.Dense(WIDTH)(y))))


def _bytes() -> None:
    found = {}
    ways = [("replicated", "float32"), ("sharded", "float32"), ("sharded", "mixed_bfloat16")]
    with two_hosts(_RATE.value) as names:
        for number, (way, policy) in enumerate(ways):
            few, many = (
                measured_on(
                    names,
                    "benchmarks.sharded_weights",
                    [f"--way={way}", f"--policy={policy}", f"--layers={layers}", f"--steps={_STEPS.value}"],
                    port=2500 + 2 * number + more,
                    limit=LIMIT,
                )
                for more, layers in enumerate((2, 6))
            )
            found[way, policy] = (many["bytes"] - few["bytes"]) / 4
            share = found[way, policy] / found["replicated", "float32"]
            print(f"{way}, {policy}: {found[way, policy] / 1e6:.3f} MB a layer and step, {share:.3f}", flush=True)
    print(f"A layer has {4 * WIDTH * (WIDTH + 1) / 1e6:.3f} MB of weights; at {_RATE.value}")


def _worker() -> dict:
    """Trains, and returns the bytes received of a step."""
    task = {"type": "worker", "index": _RANK.value}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": _ADDRESSES.value}, "task": task})
    import keras
    import numpy as np

    devices = toolkit.devices.configure(gpus=1, emulate="auto")
    strategy = toolkit.strategies.create("multi_worker", devices=devices.logical_devices, weights=_WAY.value)
    keras.mixed_precision.set_dtype_policy(_POLICY.value)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH) for _ in range(_LAYERS.value)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    x = np.ones((4 * (WARM + _STEPS.value), WIDTH), "float32")
    seen: list[int] = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(received()))  # noqa: ARG005
    model.fit(x, x, batch_size=4, verbose=0, shuffle=False, callbacks=[each])
    return {"bytes": (seen[-1] - seen[WARM - 1]) / (len(seen) - WARM)}


if __name__ == "__main__":
    toolkit.cli.run(main)
