"""Images per second of `fit` under parameter servers, beside a plain ClusterCoordinator loop in the same processes.

    python -m benchmarks.parameter_server

The plain loop is the one of TensorFlow's parameter server tutorial: a dataset on each worker, one
scheduled function a step, a join at the end. The same model, data and optimizer in both, 2 workers
and 2 ps; pairs in turn.
"""

import os
import statistics
import subprocess
import sys
import time

from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 5, "Pairs of measurements.", lower_bound=1)
_BATCHES = flags.DEFINE_list("batch_sizes", ["8", "128"], "Examples per step.")
_STEPS = flags.DEFINE_list("steps", ["800", "100"], "Steps of each measurement, for each batch size.")


def main() -> None:
    """Prints each pair, and the median ratio for each batch size."""
    if "TF_CONFIG" not in os.environ:
        command = [sys.executable, "-m", "toolkit", "launch", "--chief", "--workers=2", "--ps=2", "--show=chief:0"]
        sys.exit(subprocess.run([*command, "-m", "benchmarks.parameter_server", *sys.argv[1:]], check=False).returncode)
    strategy = toolkit.strategies.create("parameter_server")
    for size, steps in zip(_BATCHES.value, _STEPS.value, strict=True):
        compare(strategy, int(size), int(steps))


def compare(
    strategy: "toolkit.strategies.parameter_servers.strategy.ParameterServerStrategy", size: int, steps: int
) -> None:
    """Measures both ways in turn, after a warm-up of each."""
    ways = {"plain": plain(strategy, size), "toolkit": fitted(strategy, size)}
    for way in ways.values():
        way(steps)
    ratios = []
    for number in range(_PAIRS.value):
        rates = {}
        for name in sorted(ways, reverse=bool(number % 2)):
            began = time.perf_counter()
            ways[name](steps)
            rates[name] = size * steps / (time.perf_counter() - began)
        ratios.append(rates["toolkit"] / rates["plain"])
        print(
            f"{size} per step: plain {rates['plain']:,.0f} images/s, toolkit {rates['toolkit']:,.0f}, "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(
        f"{size} per step: median of {_PAIRS.value} pairs {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def built():
    """Two convolutions and two FC layers."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def dataset(size):
    """A worker's pipeline, the same for both."""
    import tensorflow as tf

    def batch(number):
        seed = tf.stack([number, number])
        images = tf.random.stateless_uniform([size, 32, 32, 3], seed, maxval=255, dtype=tf.int32)
        return tf.cast(images, tf.uint8), tf.random.stateless_uniform([size], seed, maxval=10, dtype=tf.int32)

    return tf.data.Dataset.range(2**40).map(batch).prefetch(4)


def plain(strategy, size):
    """The tutorial's loop; returns what runs so many steps."""
    import keras
    import tensorflow as tf

    # TensorFlow's own scope: variables where its strategy puts them.
    with tf.distribute.ParameterServerStrategy.scope(strategy):
        model = built()
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    iterator = iter(strategy.coordinator.create_per_worker_dataset(lambda: dataset(size)))

    @tf.function
    def step(iterator):
        def replica(images, labels):
            with tf.GradientTape() as tape:
                predicted = model(images, training=True)
                loss = loss_of(labels, predicted)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, predicted)
            return loss

        return strategy.run(replica, args=next(iterator))

    def run(steps):
        for _ in range(steps):
            strategy.coordinator.schedule(step, args=(iterator,))
        strategy.coordinator.join()

    return run


def fitted(strategy, size):
    """Keras's `fit`; returns what runs so many steps."""
    import keras

    with strategy.scope():
        model = built()
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = strategy.distribute_datasets_from_function(lambda _: dataset(size))

    def run(steps):
        model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)

    return run


if __name__ == "__main__":
    toolkit.cli.run(main)
