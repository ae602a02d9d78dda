"""Trains one case of the battery in a process of its own, and writes what it saw.

A process of its own for each, because TensorFlow's collectives, which synchronised batch normalisation uses, keep the
size of a group of devices for the process's life.

    python train.py STRATEGY[/SHARDS[/OPTIMIZER_STATE]] REPLICAS MODEL OPTIMIZER DTYPE STEPS OUT.npz

Under multi_worker there are as many of these as replicas, each with its TF_CONFIG; under one of SERVED one in each task
of a cluster with parameter servers, of which the chief writes.
"""

import json
import sys
import types

import checked
import keras
import numpy as np

import toolkit
from toolkit.data.data_sets import load_shapes
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
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


@keras.saving.register_keras_serializable("conformance")
class Positions(keras.layers.Layer):
    """Adds what a table has for each place of a sequence."""

    def __init__(self, table, **more):
        super().__init__(**more)
        self.table = table

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))

    def get_config(self):
        return {**super().get_config(), "table": keras.saving.serialize_keras_object(self.table)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("table")), **config)


def vit(kinds=keras.layers, *, table=None, first=None, second=None):
    """A vision transformer of one block, in layers of Keras's or sharded ones."""
    layers = keras.layers
    pictures = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 8, strides=8)(layers.Rescaling(1 / 64, offset=-1.9)(pictures))
    x = Positions(kinds.Embedding(16, 16, **(table or {})))(layers.Reshape((16, 16))(x))
    normalised = layers.LayerNormalization()(x)
    x = x + kinds.MultiHeadAttention(4, 5)(normalised, normalised)
    hidden = kinds.Dense(50, activation="gelu", **(first or {}))(layers.LayerNormalization()(x))
    x = x + kinds.Dense(16, **(second or {}))(hidden)
    return keras.Model(pictures, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def sharded_vit():
    """The same, its attention by heads, its FFN as a pair, its table by rows."""
    ours = {name.removeprefix("Sharded"): getattr(toolkit.parallel, name) for name in dir(toolkit.parallel)}
    ways = {"table": {"split": "rows"}, "first": {"keep_split": True}, "second": {"split": "inputs"}}
    return vit(types.SimpleNamespace(**ours), **ways)


SERVED = {
    "rounds": {"synchronous": True},
    "rounds_sharded": {"synchronous": True, "variables": "sharded", "min_shard_bytes": 1024},
    "free": {"variables": "sharded", "min_shard_bytes": 1024},
    "in_turn_sharded": {"max_staleness": 0, "variables": "sharded", "min_shard_bytes": 1024, "shards": 3},
}
MODELS = {
    "plain": plain,
    "sharded": sharded,
    "vit": vit,
    "sharded_vit": sharded_vit,
    "small_cnn": lambda: toolkit.models.build("small_cnn"),
}


class StepLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def compiled(strategy, model, optimizer, *, xla=False):
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = MODELS[model]()
        model.compile(
            OPTIMIZERS[optimizer](),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=xla or "auto",
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
    name, xla = name.removesuffix(" with XLA"), name.endswith(" with XLA")
    keras.config.set_floatx(dtype)
    if name in SERVED:
        strategy = toolkit.strategies.create(
            "auto", parameter_server=toolkit.strategies.ParameterServerOptions(**SERVED[name]), check=checked.CHECK
        )
    else:
        name, shards, slots = [*name.split("/"), "", ""][:3]
        here = 1 if name == "multi_worker" else int(replicas)
        devices = toolkit.devices.configure(gpus=here, emulate="always")
        more = {"shards": int(shards) if shards else None, "optimizer_state": slots or "replicated"}
        more["check"] = checked.CHECK
        strategy = toolkit.strategies.create(name, devices=devices.logical_devices, **more)
    examples = load_shapes(train=600, test=203)
    batches = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=BATCH, seed=2)
    model = compiled(strategy, model, optimizer, xla=xla)
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
