"""A step that looks up rows of a large table on a ps: bytes on the network and time, beside TensorFlow's own loop.

    python -m benchmarks.sparse_embedding

The other way is as lean as it gets: `tf.nn.embedding_lookup` in a function that ClusterCoordinator schedules, and the
gradients subtracted from the table's rows. Both train a table of 100,000 x 64 with SGD, in batches of 256, with 2
workers and 2 ps; pairs in turn. Bytes are those of the loopback device, whatever else uses it.
"""

import os
import statistics
import subprocess
import sys
import time

import psutil
from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 5, "Pairs of measurements.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 400, "Steps of each measurement.", lower_bound=1)
_VARIABLES = flags.DEFINE_enum("variables", "round_robin", ["round_robin", "sharded"], "Where the table's rows live.")
ROWS, WIDTH, BATCH = 100_000, 64, 256


def main() -> None:
    """Prints each pair, and the medians."""
    if "TF_CONFIG" not in os.environ:
        command = [sys.executable, "-m", "toolkit", "launch", "--chief", "--workers=2", "--ps=2", "--show=chief:0"]
        sys.exit(subprocess.run([*command, "-m", "benchmarks.sparse_embedding", *sys.argv[1:]], check=False).returncode)
    options = toolkit.strategies.ParameterServerOptions(variables=_VARIABLES.value)
    strategy = toolkit.strategies.create("parameter_server", parameter_server=options)
    ways = {"plain": plain(strategy), "toolkit": fitted(strategy)}
    for way in ways.values():
        way(_STEPS.value)
    touched = BATCH * WIDTH * 4
    print(f"rows of a batch: {touched:,} bytes; the table: {ROWS * WIDTH * 4:,}", flush=True)
    ratios: dict[str, list[float]] = {"seconds": [], "bytes": []}
    for number in range(_PAIRS.value):
        seen = {}
        for name in sorted(ways, reverse=bool(number % 2)):
            began, sent = time.perf_counter(), _on_loopback()
            ways[name](_STEPS.value)
            seen[name] = (time.perf_counter() - began) / _STEPS.value, (_on_loopback() - sent) / _STEPS.value
        ratios["seconds"].append(seen["toolkit"][0] / seen["plain"][0])
        ratios["bytes"].append(seen["toolkit"][1] / touched)
        print(
            "; ".join(f"{name} {1000 * seen[name][0]:.2f} ms, {seen[name][1]:,.0f} bytes a step" for name in ways)
            + f"; time {ratios['seconds'][-1]:.2f}",
            flush=True,
        )
    for name, found in ratios.items():
        what = "time, toolkit / plain" if name == "seconds" else "bytes, toolkit / rows of a batch"
        median = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        print(f"{what}: median of {len(found)}: {median}", flush=True)


def _on_loopback() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def dataset():
    """A worker's pipeline, the same for both."""
    import tensorflow as tf

    def batch(number):
        seed = tf.stack([number, number])
        rows = tf.random.stateless_uniform([BATCH], seed, maxval=ROWS, dtype=tf.int32)
        return rows, tf.random.stateless_normal([BATCH], seed)

    return tf.data.Dataset.range(2**40).map(batch).prefetch(4)


def plain(strategy):
    """The tutorial's loop with a lookup of TensorFlow's; returns what runs so many steps."""
    import tensorflow as tf

    with tf.distribute.ParameterServerStrategy.scope(strategy):
        table = tf.Variable(tf.random.normal([ROWS, WIDTH], stddev=0.05))
        kernel = tf.Variable(tf.random.normal([WIDTH, 1]))
        bias = tf.Variable(tf.zeros([1]))
    iterator = iter(strategy.coordinator.create_per_worker_dataset(dataset))

    @tf.function
    def step(iterator):
        def replica(rows, wanted):
            with tf.GradientTape() as tape:
                predicted = tf.nn.embedding_lookup(table, rows) @ kernel + bias
                loss = tf.reduce_mean(tf.square(predicted[:, 0] - wanted))
            for_table, *rest = tape.gradient(loss, [table, kernel, bias])
            table.scatter_sub(tf.IndexedSlices(0.1 * for_table.values, for_table.indices))
            for variable, gradient in zip((kernel, bias), rest, strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        return strategy.run(replica, args=next(iterator))

    def run(steps):
        for _ in range(steps):
            strategy.coordinator.schedule(step, args=(iterator,))
        strategy.coordinator.join()

    return run


def fitted(strategy):
    """Keras's `fit`; returns what runs so many steps."""
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((), dtype="int32"), keras.layers.Embedding(ROWS, WIDTH), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = strategy.distribute_datasets_from_function(lambda _: dataset())

    def run(steps):
        model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)

    return run


if __name__ == "__main__":
    toolkit.cli.run(main)
