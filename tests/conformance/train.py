"""Trains one case of the battery in a process of its own, and writes what it saw.

A process of its own for each, because TensorFlow's collectives, which synchronised batch normalisation uses, keep the
size of a group of devices for the process's life.

    python train.py STRATEGY REPLICAS MODEL OPTIMIZER DTYPE STEPS OUT.npz

Under multi_worker there are as many of these as replicas, each with its TF_CONFIG; under one of SERVED one in each task
of a cluster with parameter servers, of which the chief writes.
"""

import json
import sys

import keras
import numpy as np

import toolkit
from toolkit.data import shapes
from toolkit.strategies.replica_shards import ReplicaShardedVariable
from toolkit.training import state

BATCH = 132  # Shared equally by 1, 2, 3 and 4.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.003, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adam": lambda: keras.optimizers.Adam(1e-4),
    "adamw": lambda: keras.optimizers.AdamW(1e-4, weight_decay=0.01, global_clipnorm=1.0, use_ema=True),
}


def plain():
    """Convolutions and FC layers without normalisation, which magnifies rounding from step to step."""
    layers = keras.layers
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 64, offset=-1.9)]
    for filters in (16, 32):
        parts += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    return keras.Sequential([*parts, layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)])


def sharded():
    """The same, its FC layers and one convolution split over the replicas, of numbers that don't divide."""
    layers, parallel = keras.layers, toolkit.parallel
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 64, offset=-1.9)]
    for kind, filters in ((layers.Conv2D, 16), (parallel.ShardedConv2D, 32)):
        parts += [kind(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    parts += [layers.Flatten(), parallel.ShardedDense(64, activation="relu", keep_split=True)]
    return keras.Sequential([*parts, parallel.ShardedDense(10, split="inputs")])


SERVED = {
    "rounds": {"synchronous": True},
    "rounds_sharded": {"synchronous": True, "variables": "sharded", "min_shard_bytes": 1024},
    "free": {"variables": "sharded", "min_shard_bytes": 1024},
    "in_turn_sharded": {"max_staleness": 0, "variables": "sharded", "min_shard_bytes": 1024, "shards": 3},
}
MODELS = {"plain": plain, "sharded": sharded, "small_cnn": lambda: toolkit.models.build("small_cnn")}


class StepLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def compiled(strategy, model, optimizer):
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = MODELS[model]()
        model.compile(
            OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
    return model


def copies_agree(variable):
    """Says whether every replica holds the same value, or its own shard."""
    if isinstance(variable, ReplicaShardedVariable):
        return all(np.any(shard.numpy()) for shard in variable.shards) or "bias" in variable.path
    copies = [copy.numpy() for copy in getattr(variable.value, "values", [variable.value])]
    return all(np.array_equal(copy, copies[0]) for copy in copies)


def main():
    name, replicas, model, optimizer, dtype, steps, out = sys.argv[1:]
    keras.config.set_floatx(dtype)
    if name in SERVED:
        strategy = toolkit.strategies.create(
            "auto", parameter_server=toolkit.strategies.ParameterServerOptions(**SERVED[name])
        )
    else:
        here = 1 if name == "multi_worker" else int(replicas)
        devices = toolkit.devices.configure(gpus=here, emulate="always")
        strategy = toolkit.strategies.create(name, devices=devices.logical_devices)
    examples = shapes.load(train=600, test=203)
    batches = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=BATCH, seed=2)
    model = compiled(strategy, model, optimizer)
    losses = StepLosses()
    model.fit(batches.train(), steps_per_epoch=int(steps), callbacks=[losses], verbose=0, shuffle=False)
    evaluated = model.evaluate(batches.test(), verbose=0, return_dict=True)
    np.savez(
        out,
        losses=losses.losses,
        evaluated=[evaluated["loss"], evaluated["accuracy"]],
        predicted=model.predict(examples.test_images, batch_size=30 * int(replicas), verbose=0),
        described=json.dumps(toolkit.strategies.describe(strategy)),
        agree=all(copies_agree(variable) for variable in model.weights),
        **{f"state/{key}": value for key, value in state.capture(model).items()},
    )


if __name__ == "__main__":
    main()
