"""A^n + B^n on one device and on two: the same sum, and the time of each.

    python -m recipes.matmul_devices --size=2000 --power=10

One device computes one power after the other; two devices compute one power
each, and the CPU adds them. NumPy's result is the reference. Without a GPU,
logical CPU devices stand in; they share cores, so two are no faster than one.
"""

import time

import psutil
from absl import flags

import toolkit

toolkit.cli.flags.define_devices()
flags.DEFINE_integer("size", 2000, "Rows and columns of A and B.", lower_bound=1)
flags.DEFINE_integer("power", 10, "The exponent n.", lower_bound=1)
flags.DEFINE_integer("rounds", 3, "Times to run each way, in turn.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Seed of the numbers in A and B.", lower_bound=0)
flags.DEFINE_string("chart", None, "File to draw a chart of the seconds to, .png or .svg.")
FLAGS = flags.FLAGS
TOLERANCE = 1e-4  # Relative to the largest entry: float32 has seven digits, and each product adds up --size of them.


def main() -> None:
    """Devices, matrices, both ways in turn, table and chart."""
    toolkit.devices.restart(FLAGS.visible_devices)
    toolkit.cli.check_chart(FLAGS.chart)
    check()
    devices = toolkit.devices.configure(**{**toolkit.cli.flags.devices(), "gpus": FLAGS.gpus or 2})
    toolkit.cli.show_devices(devices)
    first, *others = devices.logical_devices

    import numpy as np

    random = np.random.default_rng(FLAGS.seed)
    # Rows that sum to 1, so that the powers neither grow nor vanish.
    a, b = (random.random((FLAGS.size, FLAGS.size), np.float32) for _ in range(2))
    a, b = (each / each.sum(axis=1, keepdims=True) for each in (a, b))
    expected = np.linalg.matrix_power(a, FLAGS.power) + np.linalg.matrix_power(b, FLAGS.power)

    ways = {f"one device ({first})": prepare(a, b, first, first)}
    if others:
        ways[f"two devices ({first}, {others[0]})"] = prepare(a, b, first, others[0])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors = {}
    for _ in range(FLAGS.rounds):
        for name, compute in ways.items():
            began = time.perf_counter()
            total = compute()
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


def prepare(a, b, left_device: str, right_device: str):
    """Returns a function that computes the sum on two devices, or on one device named twice, as a NumPy array."""
    import tensorflow as tf

    def power(matrix: tf.Tensor) -> tf.Tensor:
        product = matrix
        for _ in range(FLAGS.power - 1):
            product = tf.matmul(product, matrix)
        return product

    @tf.function
    def add_powers(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.device(left_device):
            left = power(a)
        # One device computes one power after the other.
        with tf.device(right_device), tf.control_dependencies([left] if left_device == right_device else []):
            right = power(b)
        with tf.device("CPU:0"):
            return left + right

    with tf.device(left_device):
        left = tf.constant(a)
    with tf.device(right_device):
        right = tf.constant(b)
    add_powers(left, right)  # Tracing and placement don't count.
    return lambda: add_powers(left, right).numpy()


def check() -> None:
    """Refuses impossible requests before any work."""
    if (FLAGS.gpus or 2) > 2:
        raise toolkit.errors.RequestError(
            asked=f"--gpus={FLAGS.gpus}", found="the sum has two terms", remedy="Leave it out, or give 1 or 2"
        )
    # A, B, their powers so far, and the next ones, with four bytes for each element.
    needed, free = 8 * 4 * FLAGS.size**2, psutil.virtual_memory().available
    if needed > free:
        raise toolkit.errors.RequestError(
            asked=f"--size={FLAGS.size}",
            found=f"that takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} are free",
            remedy=f"Give at most {int((free / 32) ** 0.5):,}",
        )


if __name__ == "__main__":
    toolkit.cli.run(main)
