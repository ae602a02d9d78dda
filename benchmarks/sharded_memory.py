"""Weights in shards beside replicated ones: what TensorFlow's allocator holds at rest and at the peak of a step.

    python -m benchmarks.sharded_memory [--replicas=1,2,4] [--shards=2] [--width=256] [--workers] [--lora]

Six decoder blocks of a transformer, Adam, eight examples of eight words in all. Each way is measured in its own
process, by `get_memory_info` of TensorFlow's allocator, which all replicas of a process share: figures are those of all
replicas together, activations included, of which so few examples have next to none. With --workers each replica is a
process on loopback, and the figures are the sum of theirs. Targets: with four replicas fully sharded weights peak at
0.35 of replicated ones, and sharded optimizer state never above them. With --lora the blocks are frozen, and what is
trained are LoRA weights: with --width=1200 a base of 107 million weights, whose target with four replicas is 0.4.
"""

import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

import toolkit

_REPLICAS = flags.DEFINE_list("replicas", ["1", "2", "4"], "Numbers of replicas.")
_SHARDS = flags.DEFINE_integer("shards", None, "Replicas that keep one copy of the weights between them; None for all.")
_WIDTH = flags.DEFINE_integer("width", 256, "Features of a block.", lower_bound=32)
_WORKERS = flags.DEFINE_boolean("workers", False, "Whether each replica is a process.")
_LORA = flags.DEFINE_boolean("lora", False, "Whether layers are frozen, and LoRA weights trained.")
_WAY = flags.DEFINE_enum("way", None, ["replicated", "optimizer state", "weights"], "One way, which is measured here.")
_OUT = flags.DEFINE_string("out", None, "The folder for what is measured here.")
WAYS = {"replicated": {}, "optimizer state": {"optimizer_state": "sharded"}, "weights": {"weights": "sharded"}}
BLOCKS, HEADS, WORDS, LENGTH, EXAMPLES, STEPS = 6, 8, 1000, 8, 8, 6


def main() -> None:
    """Measures each way in its own processes, and prints a table."""
    if _WAY.value is not None:
        _measure(int(_REPLICAS.value[0]))
        return
    print("| replicas | in shards | at rest, MiB | peak, MiB | of replicated | ms a step |\n|" + " --- |" * 6)
    for replicas in map(int, _REPLICAS.value):
        whole = None
        for way in WAYS if replicas > 1 else ("replicated",):
            rest, peak, step = _measured(way, replicas)
            whole = whole or peak
            print(
                f"| {replicas} | {way} | {rest:.0f} | {peak:.0f} | {peak / whole:.2f} | {1000 * step:.0f} |", flush=True
            )


def _measured(way: str, replicas: int) -> tuple[float, float, float]:
    """Returns the MiB at rest and at the peak, of all replicas, and the seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "benchmarks.sharded_memory", f"--way={way}", f"--replicas={replicas}", f"--out={folder}"]
        command += [f"--shards={_SHARDS.value}"] if _SHARDS.value else []
        command += [f"--width={_WIDTH.value}", f"--workers={_WORKERS.value}", f"--lora={_LORA.value}"]
        launch = ["-m", "toolkit", "launch", f"--workers={replicas}", f"--log_dir={folder}/logs"]
        command = [*launch, *command] if _WORKERS.value and replicas > 1 else command
        environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run([sys.executable, *command], check=True, timeout=1800, env=environment, stdout=subprocess.DEVNULL)
        found = [json.loads(each.read_text()) for each in pathlib.Path(folder).glob("*.json")]
    rest, peak, step = zip(*found, strict=True)
    return sum(rest), sum(peak), max(step)


def _measure(replicas: int) -> None:
    alone = not _WORKERS.value or replicas == 1
    devices = toolkit.devices.configure(gpus=replicas if alone else 1, emulate="always")
    how = {"shards": _SHARDS.value, **WAYS[_WAY.value]}
    strategy = toolkit.strategies.create("auto", devices=devices.logical_devices, **how)
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _decoder(_WIDTH.value)
        if _LORA.value:
            _freeze(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    words = np.random.default_rng(0).integers(0, WORDS, size=(EXAMPLES * STEPS, LENGTH))
    ends: list[float] = []

    def ended(batch: int, logs: dict) -> None:  # noqa: ARG001 - Keras's names.
        ends.append(time.perf_counter())
        if batch == STEPS // 2:
            tf.config.experimental.reset_memory_stats("CPU:0")

    each = keras.callbacks.LambdaCallback(on_train_batch_end=ended)
    model.fit(words, words, batch_size=EXAMPLES, verbose=0, shuffle=False, callbacks=[each])
    held = tf.config.experimental.get_memory_info("CPU:0")
    step = statistics.median(second - first for first, second in itertools.pairwise(ends[2:]))
    name = pathlib.Path(_OUT.value) / f"{os.getpid()}.json"
    name.write_text(json.dumps([held["current"] / 2**20, held["peak"] / 2**20, step]))


def _freeze(model) -> None:
    import keras

    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
            layer.enable_lora(4)
        elif not list(layer._flatten_layers(include_self=False)):
            layer.trainable = False


def _decoder(width: int):
    import keras

    layers = keras.layers
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, width)(words)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, width // HEADS)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(words, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


if __name__ == "__main__":
    toolkit.cli.run(main)
