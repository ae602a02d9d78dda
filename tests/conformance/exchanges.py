"""Lists what each traced step exchanges, in order: a change of it is then seen in a diff.

    python tests/conformance/exchanges.py [--folder=FOLDER] [LIST ...]

writes lists of `LISTS` to tests/conformance/exchanges/ or the folder; all without names. Those of several processes
start as many.

A line is an exchange of the first replica: the kind, what is sent, and among how many; how often it is made in a row
stands before it. Exchanges in branches and loops are listed where they are traced.
"""

import argparse
import collections
import contextlib
import inspect
import itertools
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import real_models
import tensorflow as tf
from keras import layers

import toolkit
from toolkit import cluster, parallel
from toolkit.strategies.context import this_step
from toolkit.strategies.step import collectives

FOLDER = pathlib.Path(__file__).with_name("exchanges")
BATCH = 64  # Each replica has a row.


def small():
    """Each kind of exchange of a step by row: moments, gradients, a table's rows, a clip over all, metrics."""
    inputs = {"x": keras.Input((16,)), "word": keras.Input((), dtype="int32")}
    x = layers.concatenate([inputs["x"], layers.Embedding(50, 8)(inputs["word"])])
    x = layers.Dropout(0.2)(layers.BatchNormalization()(layers.Dense(32, activation="relu")(x)))
    model = keras.Model(inputs, layers.Dense(4)(layers.Dense(128, activation="relu")(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


def pictures():
    """A convolution, and a pair of layers that may be sharded."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(64, 3, activation="relu")(inputs)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(layers.MaxPooling2D(7)(x)))
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def sharded():
    """The same, sharded."""
    inputs = keras.Input((16, 16, 3))
    x = parallel.ShardedConv2D(64, 3, activation="relu")(inputs)
    x = layers.Flatten()(layers.MaxPooling2D(7)(x))
    x = parallel.ShardedDense(64, activation="relu", keep_split=True)(x)
    model = keras.Model(inputs, parallel.ShardedDense(4, split="inputs")(x))
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Contrastive(keras.Model):
    """A step that sees the whole batch."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(8)

    def call(self, x):
        return self.embed(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            z = tf.math.l2_normalize(self(x, training=True), 1)
            loss = keras.ops.mean(
                keras.losses.categorical_crossentropy(tf.eye(tf.shape(z)[0]), z @ tf.transpose(z), True)
            )
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def contrastive():
    model = Contrastive()
    model.compile(keras.optimizers.SGD(0.1))
    return model


rng = np.random.default_rng(0)
PICTURES = rng.normal(size=(BATCH, 16, 16, 3)).astype("float32")
FEATURES = rng.normal(size=(BATCH, 16)).astype("float32")
TARGETS = rng.integers(0, 4, BATCH)
SMALL = {
    "small": (small, ({"x": FEATURES, "word": rng.integers(0, 50, BATCH)}, TARGETS)),
    "pictures": (pictures, (PICTURES, TARGETS)),
    "contrastive": (contrastive, (FEATURES, TARGETS)),
}
REAL = real_models.MODELS


FIRST = {"small": SMALL["small"]}  # Each replica is traced, 64 in a minute.
SHARDED = {"sharded layers": (sharded, (PICTURES, TARGETS))}


def exchanged(**how):
    return {"gradients": toolkit.strategies.GradientExchange(**how)}


# Of each: the models, the number of replicas, and the options of `create`. Where "workers" is part of the name, each
# replica is a process.
LISTS = {
    "replicated_2": (real_models.MODELS, 2, {}),
    "replicated_8": (SMALL, 8, {}),
    "replicated_64": (FIRST, 64, {}),
    "own_statistics_8": (SMALL, 8, {"batch_statistics": "replica"}),
    "in_16_bits_8": (SMALL, 8, exchanged(dtype="bfloat16")),
    "powersgd_8": ({each: SMALL[each] for each in ("small", "pictures")}, 8, exchanged(compression="powersgd")),
    "sharded_state_8": (SMALL, 8, {"optimizer_state": "sharded"}),
    "sharded_weights_8": (SMALL, 8, {"weights": "sharded"}),
    "sharded_weights_64_by_8": (FIRST, 64, {"weights": "sharded", "shards": 8}),
    "sharded_layers_8": (SHARDED, 8, {}),
    "sharded_layers_64_by_8": (SHARDED, 64, {"shards": 8}),
    "workers_2": (SMALL, 2, {}),
    "workers_2_sharded_state": (SMALL, 2, {"optimizer_state": "sharded"}),
    "workers_2_sharded_weights": (SMALL, 2, {"weights": "sharded"}),
}


class Noted:
    """What the first replica exchanges, by the function that is traced."""

    def __init__(self):
        self.lines = collections.defaultdict(list)

    @contextlib.contextmanager
    def noting(self):
        """Replaces the two functions through which exchanges go, and the one gather that goes through neither."""
        within, call, gather = collectives._within_process, collectives._call, tf.raw_ops.CollectiveGather

        def within_noted(x, among, result):
            caller = inspect.currentframe().f_back
            self._note(
                caller.f_code.co_name.strip("_"), x, caller.f_locals.get("dtype"), len(this_step.members[among][0])
            )
            return within(x, among, result)

        def call_noted(operation, x, among, members, place):
            self._note(operation.__name__, x, None, len(members))
            return call(operation, x, among, members, place)

        def gather_noted(*, input, group_size, **more):  # noqa: A002
            self._note("gather without a place in the order", input, None, group_size)
            return gather(input=input, group_size=group_size, **more)

        collectives._within_process, collectives._call = within_noted, call_noted
        tf.raw_ops.CollectiveGather = gather_noted
        try:
            yield
        finally:
            collectives._within_process, collectives._call = within, call
            tf.raw_ops.CollectiveGather = gather

    def _note(self, kind, sent, dtype, count):
        if this_step.place:
            return
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph
        tensors = " ".join(self._described(each, dtype) for each in tf.nest.flatten([sent]))
        self.lines[graph].append(f"{kind} {tensors} of {count}")

    def _described(self, tensor, dtype):
        rows = "rows of " if isinstance(tensor, tf.IndexedSlices) else ""
        sizes = ",".join("?" if size is None else str(size) for size in tensor.shape)
        return f"{rows}{(dtype or tensor.dtype).name}[{sizes}]"


def listed(name):
    """Yields the lines of a list."""
    models, replicas, options = LISTS[name]
    yield ", ".join([f"{replicas} replicas", *(f"{key}={value}" for key, value in options.items())])
    chosen = {"devices": [f"CPU:{number}" for number in range(replicas)]}
    for model_name, (build, data) in models.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        kind, where = ("multi_worker", {}) if "workers" in name else ("mirrored", chosen)
        strategy = toolkit.strategies.create(kind, **where, **options)
        with strategy.scope():
            model = build()
        batch = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda each: each[:BATCH], data)).batch(BATCH)
        noted = Noted()
        with noted.noting():
            model.fit(batch, verbose=0)
        keras.config.set_dtype_policy("float32")
        for number, lines in enumerate(noted.lines.values()):
            yield f"\n{model_name}" + (f", traced again ({number + 1})" if number else "")
            for line, same in itertools.groupby(lines):
                yield f"{len(list(same)):5d} x {line}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    parser.add_argument("lists", nargs="*", choices=[*LISTS, []], metavar="LIST")
    given = parser.parse_args()
    names = given.lists or list(LISTS)
    most = max((LISTS[name][1] for name in names if "workers" not in name), default=1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * most)
    # Steps run, too; what TensorFlow would do to make them faster takes longer than tracing them.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    given.folder.mkdir(exist_ok=True)
    own = cluster.discover(os.environ)
    for name in names:
        if "workers" in name and own is None:
            launch = [sys.executable, "-m", "toolkit", "launch", f"--workers={LISTS[name][1]}", __file__]
            subprocess.run([*launch, f"--folder={given.folder.absolute()}", name], check=True)
            continue
        text = "\n".join(listed(name)) + "\n"
        if own is None or own.task == own.cluster.chief:
            (given.folder / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
