"""Ten steps of training in their own process, and their results; on several devices also stopped and resumed.

    python -m toolkit.observe.doctor.training STRATEGY REPLICAS OUT.json

Under multi_worker there is one in each task.
"""

import contextlib
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import toolkit
from toolkit.devices import inventory

STEPS = 10
_BATCH = 32  # Divisible by one and by two replicas.
_ELEMENTS = 4 << 20  # In float32, 16 MiB: the gradients of a model with four million parameters.
_TIMES = 5
_STOPPED_AT = 7  # A step after the checkpoint of step 5.


def asked(name: str, replicas: int, gpus: int) -> dict[str, Any]:
    """Returns what a process asks `configure` for: a machine's only GPU is split, and two processes don't share it."""
    if name == "multi_worker":
        return {"gpus": 1, "emulate": "always" if gpus == 1 else "auto"}
    return {"gpus": replicas, "split": replicas, "memory": 0.8} if gpus == 1 else {"gpus": replicas}


def main() -> None:
    """Trains, measures, and writes losses, weights and bandwidth."""
    name, replicas, out = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    devices = toolkit.devices.configure(**asked(name, replicas, len(inventory.take().gpus)))
    strategy = toolkit.strategies.create(name, devices=devices.logical_devices)

    import keras

    examples = toolkit.data.load("shapes", seed=7)
    batches = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=_BATCH, seed=7)
    model = _model(strategy)
    losses: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(batches.train(), steps_per_epoch=STEPS, callbacks=[note], verbose=0, shuffle=False)
    seconds = _exchange(strategy) if strategy.num_replicas_in_sync > 1 else None
    resumed = _resumed(strategy, batches, out.with_suffix(".run")) if name == "mirrored" else model
    if toolkit.strategies.is_chief(strategy):
        found = {
            "devices": list(devices.logical_devices),
            "losses": losses,
            "weights": _weights(model),
            "resumed_weights": _weights(resumed),
            "peak_memory": toolkit.devices.peak_memory(strategy),
            "bytes_per_second": None if seconds is None else 4 * _ELEMENTS / seconds,
        }
        out.write_text(json.dumps(found), encoding="utf-8")


def _model(strategy: Any) -> Any:
    import keras

    keras.utils.set_random_seed(7)
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
    return model


def _weights(model: Any) -> list[list[float]]:
    import keras

    return [keras.ops.convert_to_numpy(variable).ravel().tolist() for variable in model.weights]


def _resumed(strategy: Any, batches: Any, directory: pathlib.Path) -> Any:
    """Trains the same steps, stopped without warning in their midst and resumed by another model."""
    import keras

    class Stopped(Exception):
        pass

    def stop(batch: int, **_: Any) -> None:
        if batch + 1 == _STOPPED_AT:
            raise Stopped

    training: dict[str, Any] = {"recipe": "doctor", "checkpoint_steps": 5, "profile": False}
    stops = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    with contextlib.suppress(Stopped), toolkit.training.Run(directory, **training) as run:
        run.fit(_model(strategy), batches, steps_per_epoch=STEPS, callbacks=stops)
    with toolkit.training.Run(directory, resume=True, **training) as run:
        model = _model(strategy)
        run.fit(model, batches, steps_per_epoch=STEPS)
    return model


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
