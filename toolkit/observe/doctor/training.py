"""Ten steps of training in their own process, and their results.

    python -m toolkit.observe.doctor.training STRATEGY REPLICAS OUT.json

Under multi_worker there is one in each task.
"""

import json
import pathlib
import statistics
import sys
import time
from typing import Any

import toolkit

__all__ = ["STEPS"]

STEPS = 10
_BATCH = 32  # Divisible by one and by two replicas.
_ELEMENTS = 4 << 20  # In float32, 16 MiB: the gradients of a model with four million parameters.
_TIMES = 5


def main() -> None:
    """Trains, measures, and writes losses, weights and bandwidth."""
    name, replicas, out = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    devices = toolkit.devices.configure(gpus=1 if name == "multi_worker" else replicas)
    strategy = toolkit.strategies.create(name, devices=devices.logical_devices)

    import keras

    keras.utils.set_random_seed(7)
    examples = toolkit.data.load("shapes", seed=7)
    batches = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=_BATCH, seed=7)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Rescaling(1 / 64, offset=-1.9),
                layers.Conv2D(8, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    losses: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(batches.train(), steps_per_epoch=STEPS, callbacks=[note], verbose=0, shuffle=False)
    seconds = _exchange(strategy) if strategy.num_replicas_in_sync > 1 else None
    if toolkit.strategies.is_chief(strategy):
        found = {
            "devices": list(devices.logical_devices),
            "losses": losses,
            "weights": [keras.ops.convert_to_numpy(v).ravel().tolist() for v in model.weights],
            "bytes_per_second": None if seconds is None else 4 * _ELEMENTS / seconds,
        }
        out.write_text(json.dumps(found), encoding="utf-8")


def _exchange(strategy: Any) -> float:
    """Returns the median seconds of an all-reduce of an array."""
    import tensorflow as tf

    @tf.function
    def add() -> Any:
        def one() -> Any:
            mine = tf.fill([_ELEMENTS], tf.random.uniform([]))
            return tf.distribute.get_replica_context().all_reduce("SUM", mine)[0]

        return strategy.reduce("SUM", strategy.run(one), axis=None)

    add()
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        float(add())
        took.append(time.perf_counter() - began)
    return statistics.median(took)


if __name__ == "__main__":
    main()
