"""What the toolkit costs: the recipe's training against the same model by hand with plain Keras.

    python -m benchmarks.step_time [--rounds=15] [--steps=50]

Both train the same network under `MirroredStrategy` on two logical CPU devices; by hand with a `tf.data` pipeline as
Keras's guide writes it (shuffle, batch, prefetch, no augmentation) and Keras's own progress bar, the recipe with its
pipeline (augmentation included), its run directory and all its callbacks. Rounds run in turn in one process; the figure
is the median of the rounds' ratios of time per step. Target: at most 1.02.
"""

import statistics
import tempfile
import time
from typing import Any

from absl import flags

import toolkit

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "Steps that are timed in each.", lower_bound=10)
_BATCH = 128


def main() -> None:
    """Runs the pairs and prints each ratio."""
    devices = toolkit.devices.configure(gpus=2, emulate="always")
    strategy = toolkit.strategies.create("mirrored", devices=devices.logical_devices)
    examples = toolkit.data.load("shapes")
    by_hand, recipe = _by_hand(strategy, examples), _recipe(strategy, examples)
    by_hand(), recipe()  # Traces both.
    ratios = []
    for number in range(_ROUNDS.value):
        # The order alternates: the second finds warmer caches.
        first, second = (by_hand, recipe) if number % 2 else (recipe, by_hand)
        seconds = {first: first(), second: second()}
        ratios.append(seconds[recipe] / seconds[by_hand])
        per_step = {
            name: 1000 * seconds[run] / _STEPS.value for name, run in (("by hand", by_hand), ("recipe", recipe))
        }
        print(f"round {number + 1}: {per_step} ms per step, ratio {ratios[-1]:.3f}", flush=True)
    print(f"recipe / by hand, median of {len(ratios)} rounds: {statistics.median(ratios):.3f}")


def _compiled(strategy: Any) -> Any:
    import keras

    with strategy.scope():
        model = toolkit.models.build("small_cnn")
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=5e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def _timer() -> Any:
    import keras

    class Timer(keras.callbacks.Callback):
        """Seconds from the end of the first step to the end of the last: no tracing, no making of iterators."""

        began = seconds = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature.
            now = time.perf_counter()
            self.began = now if batch == 0 else self.began
            self.seconds = now - self.began

    return Timer()


def _by_hand(strategy: Any, examples: Any) -> Any:
    import tensorflow as tf

    model = _compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((examples.train_images, examples.train_labels))
    data = data.shuffle(len(examples.train_labels)).batch(_BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    data = data.repeat()

    def run() -> float:
        timer = _timer()
        model.fit(data, steps_per_epoch=_STEPS.value + 1, callbacks=[timer], shuffle=False)
        return timer.seconds

    return run


def _recipe(strategy: Any, examples: Any) -> Any:
    model = _compiled(strategy)
    batches = toolkit.data.Batches(
        examples=examples, strategy=strategy, global_batch_size=_BATCH, steps_per_epoch=_STEPS.value + 1
    )

    def run() -> float:
        timer = _timer()
        with tempfile.TemporaryDirectory() as folder, toolkit.training.Run(folder, recipe="benchmark") as held:
            held.fit(model, batches, callbacks=[timer])
        return timer.seconds

    return run


if __name__ == "__main__":
    toolkit.cli.run(main)
