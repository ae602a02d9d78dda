"""A^n + B^n on one device and on two: the same sum, and how long each takes.

    python -m recipes.matmul_devices --size=2000 --power=10

On one device the two powers are computed one after another; on two, each on its own, and added on the CPU. The sum is
held against NumPy's. Logical CPU devices stand in where there is no GPU: they share the same cores, so two of them are
no faster than one.
"""

import time

import psutil
from absl import flags

import toolkit

toolkit.cli.flags.devices_only()
flags.DEFINE_integer("size", 2000, "Rows and columns of A and B.", lower_bound=1)
flags.DEFINE_integer("power", 10, "n.", lower_bound=1)
flags.DEFINE_integer("rounds", 3, "Times that each way is run, in turn.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the numbers in A and B.", lower_bound=0)
flags.DEFINE_string("chart", None, "File for a chart of the seconds, .png or .svg.")
FLAGS = flags.FLAGS
TOLERANCE = 1e-4  # Relative to the largest entry: float32 has seven digits, and each product adds up --size of them.


def main() -> None:
    """Flags, devices, matrices, both ways in turn, table and chart."""
    toolkit.devices.restart(FLAGS.visible_devices)
    toolkit.cli.check_chart(FLAGS.chart)
    asked = toolkit.cli.flags.devices()
    check(asked["gpus"])
    devices = toolkit.devices.configure(**{**asked, "gpus": asked["gpus"] or 2})
    toolkit.cli.show_devices(devices)
    first, second = (devices.logical_devices * 2)[:2]

    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(FLAGS.seed)
    # Rows that sum up to 1, so that the powers neither grow nor vanish.
    a, b = (random.random((FLAGS.size, FLAGS.size), np.float32) for _ in range(2))
    a, b = (each / each.sum(axis=1, keepdims=True) for each in (a, b))

    def power(matrix: tf.Tensor) -> tf.Tensor:
        product = matrix
        for _ in range(FLAGS.power - 1):
            product = tf.matmul(product, matrix)
        return product

    @tf.function
    def on_one(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.device(first):
            left = power(a)
            with tf.control_dependencies([left]):  # One after another, as one device does it.
                right = power(b)
        with tf.device("CPU:0"):
            return left + right

    @tf.function
    def on_two(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.device(first):
            left = power(a)
        with tf.device(second):
            right = power(b)
        with tf.device("CPU:0"):
            return left + right

    expected = np.linalg.matrix_power(a, FLAGS.power) + np.linalg.matrix_power(b, FLAGS.power)
    ways = {f"one device ({first})": on_one}
    if len(devices.logical_devices) > 1:
        ways[f"two devices ({first}, {second})"] = on_two
    given = {}
    for name, where in zip(ways, ((first, first), (first, second)), strict=False):
        with tf.device(where[0]):
            left = tf.constant(a)
        with tf.device(where[1]):
            given[name] = (left, tf.constant(b))
        ways[name](*given[name])  # Traced and placed; the time of that doesn't count.

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors = {}
    for _ in range(FLAGS.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            total = way(*given[name]).numpy()
            seconds[name].append(time.perf_counter() - began)
            errors[name] = float(np.abs(total - expected).max() / np.abs(expected).max())
    toolkit.cli.show_seconds(
        f"A^{FLAGS.power} + B^{FLAGS.power}, {FLAGS.size} x {FLAGS.size}, {FLAGS.rounds} rounds",
        seconds,
        {"differs from NumPy by": {name: f"{error:.1e}" for name, error in errors.items()}},
        chart=FLAGS.chart,
    )
    if not max(errors.values()) < TOLERANCE:
        raise toolkit.errors.ToolkitError(f"The sums are not NumPy's: {errors}")


def check(gpus: int | None) -> None:
    """Refuses what can't be, before the work."""
    if (gpus or 2) > 2:
        raise toolkit.errors.RequestError(
            asked=f"--gpus={gpus}", found="the sum has two terms", remedy="Leave it out, or give 1 or 2"
        )
    # A, B, their powers so far, and the next ones, of four bytes each number.
    needed, free = 8 * 4 * FLAGS.size**2, psutil.virtual_memory().available
    if needed > free:
        raise toolkit.errors.RequestError(
            asked=f"--size={FLAGS.size}",
            found=f"that takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} are free",
            remedy=f"Give at most {int((free / 32) ** 0.5):,}",
        )


if __name__ == "__main__":
    toolkit.cli.run(main)
