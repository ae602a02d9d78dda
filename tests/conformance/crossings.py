"""Crossings of what users do, drawn by Hypothesis: what a script does under a strategy, and with plain Keras.

A crossing has a value of each of DIMENSIONS, of which the first is the plainest. Run one by itself, or shrink one that
goes wrong, by what a failed test printed:

    python crossings.py '{"data": "generator", "stop": "batch"}'
    python crossings.py --shrink '{"data": "generator", "stop": "batch"}'

The tests start it as a program, which trains one crossing after the other and writes down what it saw of each:

    python crossings.py KIND CROSSINGS.json OUT.jsonl

KIND is "plain", which uses nothing of the toolkit; "mirrored"; "plain+mirrored", one after the other; or
"multi_worker", of which there are two.
"""

import collections
import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import typing

import checked
import hypothesis
import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers, ops

import toolkit

DIMENSIONS = {
    "replicas": (2, 3),
    # Examples, and how many of them are in a batch: the last batch may have fewer than there are replicas.
    "sizes": ((12, 4), (11, 4), (14, 5), (3, 8), (9, 6), (10, 4), (13, 4), (9, 2)),
    "data": (
        "arrays", "dataset", "unknown_length", "shuffled", "shuffled_by_keras", "dropped", "cached", "repeated",
        "batches_repeated", "zipped", "generator", "dataset_of_generator", "uneven_batches", "pydataset",
        "pydataset_reordered",
    ),
    "steps": (None, 2, 4),
    "call": ("fit", "fit_twice", "recompiled", "evaluate", "predict", "on_batch"),
    "validation": (None, "arrays", "alike", "split", "second_epochs", "one_step"),
    "several": (1, 2, 3),
    "eager": (False, True),
    "model": (
        "dense", "subclassed", "unbuilt", "normalised", "pooled_words", "words", "two_outputs", "dict", "frozen",
        "recompute", "sharded", "counting", "adds_loss", "regularised",
    ),
    "loss": ("mse", "crossentropy", "sum", "mean_of_weights", "function", "scalar", "coupled", "masked", "dice"),
    "weights": (None, "sample", "class"),
    "metrics": (None, "mae", "weighted", "function", "counting", "largest", "vector", "dict", "f1", "auc"),
    "step": ("keras", "own", "own_tracked", "clipped", "two_optimizers", "without_call", "compute_loss"),
    "optimizer": ("sgd", "adam"),
    "rate": ("constant", "schedule"),
    "tweak": (None, "accumulation", "ema", "clipnorm", "global_clipnorm", "loss_scale"),
    "precision": ("float32", "mixed_float16"),
    "state": (None, "zero1", "powersgd", "local"),
    "stop": (None, "run", "batch", "batch_begins", "epoch_end", "validation", "error", "twice"),
    "reader": (
        None, "logs", "iterations", "weights", "evaluate", "predict", "data", "early_stopping", "plateau", "scheduler",
        "checkpoint", "stop_training", "backup",
    ),
}  # fmt: skip
ENDLESS = ("generator", "repeated", "batches_repeated")
PLAINEST = {name: values[0] for name, values in DIMENSIONS.items()}
EPOCHS, FEATURES, VALIDATED = 3, 6, 7
SPLIT = 0.4  # Of the examples are for validation.
FIRST_VALIDATED = 50  # The number of the first validation example.


class Known(typing.NamedTuple):
    """A fault that is known: crossings that have it are left out, or only some of what they show is compared."""

    has: typing.Callable[[dict], bool]
    why: str
    compared: tuple[str, ...] = ()  # Nothing: such crossings aren't drawn.
    kinds: tuple[str, ...] = ("mirrored", "multi_worker")


def smallest_batch(crossing, count):
    """The size of the smallest batch of so many examples."""
    sizes = [len(rows) for rows in chunks(crossing, np.arange(count))]
    if crossing["data"] == "dropped":
        sizes = [size for size in sizes if size == crossing["sizes"][1]]
    return min(sizes, default=0)


def chunks(crossing, order):
    """Yields the numbers of each batch's examples."""
    batch = crossing["sizes"][1]
    start = 0
    for size in itertools.cycle((batch, 3, batch + 2) if crossing["data"] == "uneven_batches" else (batch,)):
        if start >= len(order):
            return
        yield order[start : start + size]
        start += size


def examples(crossing):
    """How many there are to train, and to validate."""
    count = crossing["sizes"][0]
    if crossing["validation"] == "split":
        return int(count * (1 - SPLIT)), count - int(count * (1 - SPLIT))
    validates = crossing["validation"] or crossing["reader"] == "evaluate"
    return count, VALIDATED if validates or crossing["call"] == "on_batch" else 0


def steps_of(crossing):
    """The steps of an epoch."""
    return crossing["steps"] or len(list(chunks(crossing, np.arange(examples(crossing)[0]))))


def counts_the_end(c):
    """Whether plain Keras begins a step that finds no data."""
    unknown = c["data"] in ("unknown_length", "dataset_of_generator", "uneven_batches")
    empty = c["data"] == "dropped" and c["sizes"][0] < c["sizes"][1]
    ends = unknown or empty or (c["steps"] and c["data"] not in ENDLESS)
    return c["call"] in ("fit", "fit_twice", "recompiled") and bool(ends)


def trains_on_less(crossing):
    return smallest_batch(crossing, examples(crossing)[0]) < crossing["replicas"]


def validates_on_less(crossing):
    count = examples(crossing)[1]
    return bool(count and smallest_batch(crossing, count) < crossing["replicas"])


KNOWN = {
    "sharded layers by batch": Known(
        lambda c: (c["model"] == "sharded" or c["state"] == "zero1") and c["reader"] == "checkpoint",
        "Refused: what is sharded over processes is gathered at an epoch's end only.",
        kinds=("multi_worker",),
    ),
    "sharded layers, clipped by hand": Known(
        lambda c: c["model"] == "sharded" and c["step"] == "clipped",
        "Refused: each replica has a part of a sharded layer's gradients, and so another norm of them all.",
    ),
    "replicas by themselves, largest": Known(
        lambda c: c["state"] == "local" and c["metrics"] == "largest",
        "Refused: a state that isn't a sum would need the whole batch in each step.",
    ),
    "replicas by themselves, logs of a batch": Known(
        lambda c: c["state"] == "local" and c["reader"] == "logs",
        "Within an epoch logs are those of the first replica, which exchanges with none.",
        compared=("history", "weights", "iterations", "used", "summary steps"),
    ),
    "replicas by themselves, by batch": Known(
        lambda c: c["state"] == "local" and c["reader"] == "checkpoint",
        "Refused: replicas that train by themselves are saved at an epoch's end only.",
    ),
    "restored unbuilt": Known(
        lambda c: c["model"] == "unbuilt" and c["data"] == "generator" and c["stop"] not in (None, "run"),
        "Refused: neither the model nor a generator says shapes before there is data.",
    ),
    "another order meanwhile": Known(
        lambda c: c["data"] == "pydataset_reordered" and c["steps"] is not None,
        "Keras reads ahead while an epoch's end changes the order: which batches have the old one is a matter of time.",
    ),
    "built for one batch": Known(
        lambda c: c["model"] == "unbuilt" and c["call"] == "on_batch",
        "A model that is built by a batch is built for its size, so that each replica computes the whole batch.",
        compared=("history", "weights", "iterations"),
    ),
    "counted without data": Known(
        lambda c: c["model"] == "counting" and counts_the_end(c),
        "Plain Keras's step at the end of data of unknown length is counted by the layer.",
        compared=("history", "iterations", "used", "summary steps", "readings"),
    ),
    "steps beyond the end": Known(
        lambda c: counts_the_end(c) and c["steps"] is not None,
        "Data of unknown length with fewer batches than steps_per_epoch: workers begin again, plain Keras doesn't.",
        kinds=("multi_worker",),
    ),
    "the chief reads": Known(
        lambda c: c["reader"] == "data" and c["data"] in ("shuffled", "batches_repeated", "cached"),
        "The chief alone draws an order of a shuffle: from then on workers keep their shares of different orders.",
        kinds=("multi_worker",),
    ),
    "copies": Known(
        lambda c: trains_on_less(c) or validates_on_less(c),
        "A replica without examples of a batch computes with a copy, which counts for nothing; the model notes it.",
        compared=("history", "weights", "iterations", "summary steps", "readings"),
    ),
    "steps that data has not": Known(
        lambda c: (
            c["stop"] is not None
            and ((c["several"] > 1 and steps_of(c) % c["several"] != 0) or (c["steps"] and c["data"] not in ENDLESS))
        ),
        "A run counts the steps that Keras asks for, not those that the data has.",
    ),
    "Keras counts the end, and goes by it": Known(
        lambda c: (
            counts_the_end(c)
            and (c["rate"] == "schedule" or c["optimizer"] == "adam" or c["tweak"] in ("accumulation", "ema"))
        ),
        "Plain Keras's own fault: its step at the end of data of unknown length adds 1 to `optimizer.iterations`.",
        compared=("used", "summary steps"),
    ),
    "Keras counts the end": Known(
        lambda c: (
            counts_the_end(c) and c["step"] not in ("own_tracked", "without_call") and c["reader"] != "iterations"
        ),
        "As above.",
        compared=("history", "weights", "used", "summary steps", "readings"),
    ),
    "Keras counts the end, also in means": Known(
        counts_the_end,
        "As above: it adds 1 to the count of a mean of scalars, too.",
        compared=("weights", "used", "summary steps"),
    ),
    "endless shuffle, read again": Known(
        lambda c: (
            c["data"] == "batches_repeated"
            and (
                c["call"] in ("fit_twice", "recompiled")
                or c["validation"] in ("alike", "one_step")
                or c["reader"] == "data"
            )
        ),
        "What is read ahead at the end of a call or a validation draws the order of passes that the next begins with.",
    ),
}


def sensible(c):
    """Whether a crossing is something that plain Keras does, and that its options mean the same for."""
    fits = c["call"] in ("fit", "fit_twice", "recompiled")
    arrays = c["data"] in ("arrays", "shuffled_by_keras")
    plain_model = c["model"] not in ("words", "two_outputs", "dict", "pooled_words")
    return all(
        (
            fits or not (c["validation"] or c["stop"] or c["reader"] or c["steps"]),
            c["call"] != "on_batch" or (arrays and c["several"] == 1),
            c["call"] not in ("evaluate", "predict")
            or (c["tweak"] is None and c["state"] is None and c["rate"] == "constant" and c["optimizer"] == "sgd"),
            c["call"] != "predict" or (c["loss"], c["metrics"], c["weights"]) == ("mse", None, None),
            c["validation"] != "split" or arrays,
            c["stop"] != "validation" or c["validation"],
            c["reader"] != "backup" or c["stop"] is None,
            c["reader"] not in ("scheduler", "plateau") or c["rate"] == "constant",
            c["step"] not in ("own_tracked", "two_optimizers", "without_call") or c["metrics"] is None,
            c["weights"] != "class" or (c["data"] != "generator" and not c["data"].startswith("pydataset")),
            c["reader"] not in ("early_stopping", "plateau") or c["step"] != "own_tracked",
            c["weights"] is None or c["model"] != "words",
            c["weights"] != "class" or (c["model"] != "two_outputs" and c["loss"] != "masked"),
            c["weights"] != "class" or c["call"] in ("fit", "fit_twice", "recompiled", "on_batch"),
            c["metrics"] not in ("f1",) or c["model"] != "words",
            c["step"] != "without_call" or plain_model,
            c["step"] != "two_optimizers" or c["model"] in ("dense", "frozen", "sharded", "recompute"),
            # In 16 bits thresholds and sums are others.
            c["precision"] == "float32"
            or (
                c["state"] in (None, "zero1")
                and c["tweak"] != "loss_scale"
                and c["metrics"] in (None, "mae", "weighted")
                and c["loss"] in ("mse", "function", "scalar")
                and c["optimizer"] == "adam"
                and c["model"] != "normalised"
            ),
            not (c["eager"] or c["model"] == "recompute") or c["several"] == 1,
            # Their numbers are one device's for plain steps of SGD only.
            c["state"] not in ("powersgd", "local")
            or (c["optimizer"], c["tweak"], c["step"]) == ("sgd", None, "keras"),
            c["state"] != "local"
            or (c["several"] == 1 and c["model"] in ("dense", "subclassed", "frozen") and c["loss"] in ("mse",)),
            c["state"] != "powersgd" or c["model"] in ("dense", "frozen"),
        )
    )


def crossings(kind="mirrored"):
    """Returns a Hypothesis strategy of crossings, without those whose fault is known."""

    def wanted(crossing):
        return sensible(crossing) and not any(
            kind in each.kinds and not each.compared and each.has(crossing) for each in KNOWN.values()
        )

    every = {name: st.sampled_from(values) for name, values in DIMENSIONS.items()}
    if kind == "multi_worker":
        every |= {"replicas": st.just(2), "eager": st.just(False)}
    # Half of the dimensions at a time: with all, something is refused nearly always.
    chosen = st.sets(st.sampled_from(sorted(every)), min_size=4, max_size=11)
    mixed = st.builds(
        lambda values, names: {k: v if k in names else PLAINEST[k] for k, v in values.items()},
        st.fixed_dictionaries(every),
        chosen,
    )
    return mixed.filter(wanted)


def seconds(c):
    """About how long a crossing takes."""
    if c["call"] in ("evaluate", "predict"):
        return 0.7
    fits = 1.0 if c["stop"] in (None, "run") else 2.2 if c["stop"] == "twice" else 1.6
    more = bool(c["validation"]) + (c["reader"] in ("evaluate", "predict")) + (c["call"] == "recompiled")
    return fits * (1.5 + 0.5 * bool(c["stop"]) + 1.0 * more + 0.7 * c["eager"] + 0.5 * (c["replicas"] == 3))


def drawn(count, seed, kind="mirrored", *, pool=None, cheap=False):
    """Returns so many crossings that have as many pairs of values as possible in little time.

    Args:
        count: How many.
        seed: Of Hypothesis's draws.
        kind: Of the strategy.
        pool: From how many draws they are chosen; ten times as many unless given.
        cheap: Whether to take the cheapest quarter of the draws only.
    """
    found = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=pool or 10 * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(crossings(kind))
    def draw(crossing):
        found[json.dumps(crossing)] = crossing

    draw()
    most = sorted(map(seconds, found.values()))[len(found) // (4 if cheap else 1) - 1]
    pairs = {key: pairs_of([c]) for key, c in found.items() if seconds(c) <= most}
    missing, chosen = set().union(*pairs.values()), []
    while pairs and len(chosen) < count:
        key = max(pairs, key=lambda each: len(pairs[each] & missing) / seconds(found[each]))
        missing -= pairs.pop(key)
        chosen.append(found[key])
    return chosen


def pairs_of(some):
    """Returns the pairs of values, of two dimensions, that are in any of some crossings."""
    return {pair for c in some for pair in itertools.combinations(c.items(), 2)}


# What a crossing does.


class Noted:
    """Which examples were used in which phase, as the model itself was given them: not what data or metrics say."""

    def __init__(self, *, replicated=False):
        self.replicated = replicated
        self.phase = None
        self.used = collections.defaultdict(collections.Counter)
        self.calls = collections.Counter()
        self.lock = threading.Lock()

    def take(self, ids):
        with self.lock:
            if self.phase is not None:
                self.used[self.phase].update(int(n) for n in ids)
                self.calls[self.phase] += 1
        return np.int64(0)


NOTED = Noted()


class Note(layers.Layer):
    """Notes the numbers of examples, which are in the first column, and passes the other columns on."""

    def call(self, x):
        # The second opinion, with checked.CHECK, isn't the script's own step: nothing of ours is attached there.
        second = NOTED.replicated and not hasattr(keras.optimizers.Optimizer.apply, "_toolkit")
        if second or not getattr(x, "dtype", None) or not isinstance(x, tf.Tensor):
            return x[:, 1:]
        tf.numpy_function(NOTED.take, [x[:, 0]], tf.int64)
        return x[:, 1:]

    def compute_output_shape(self, shape):
        return (*shape[:-1], FEATURES)


class Phases(keras.callbacks.Callback):
    """Says in which phase examples are used."""

    def __init__(self, call):
        super().__init__()
        self.call, self.outer = call, None

    def on_epoch_begin(self, epoch, logs=None):
        NOTED.phase = f"{self.call} train {epoch}"

    def on_test_begin(self, logs=None):
        self.outer, NOTED.phase = NOTED.phase, f"{NOTED.phase or self.call} test"

    def on_test_end(self, logs=None):
        NOTED.phase = self.outer

    def on_predict_begin(self, logs=None):
        self.outer, NOTED.phase = NOTED.phase, f"{NOTED.phase or self.call} predict"

    def on_predict_end(self, logs=None):
        NOTED.phase = self.outer

    def on_train_end(self, logs=None):
        NOTED.phase = None


class Examples:
    """The examples of a crossing, and the forms in which `fit` is given them."""

    def __init__(self, crossing, count, first, seed):
        random = np.random.default_rng(seed)
        self.crossing, self.count, self.batch = crossing, count, crossing["sizes"][1]
        ids = np.arange(first, first + count, dtype="float32")[:, None]
        values = random.normal(size=(count, FEATURES)).astype("float32")
        if "words" in crossing["model"]:
            values = random.integers(1, 20, size=(count, FEATURES)) * (
                np.arange(FEATURES) < 1 + np.arange(count)[:, None] % FEATURES
            )
        x = np.concatenate([ids, values], 1).astype("int32" if "words" in crossing["model"] else "float32")
        labels = (random.uniform(size=(count, 1)) > 0.5).astype("float32")
        if crossing["model"] == "words":
            labels = (random.uniform(size=(count, FEATURES, 1)) > 0.5).astype("float32")
        if crossing["loss"] == "masked":
            labels[::3] = -1
        two = crossing["model"] == "two_outputs"
        y = {"a": labels, "b": 1 - labels} if two else labels
        weight = np.linspace(0.5, 1.5, count).astype("float32")
        self.x = {"values": x} if crossing["model"] == "dict" else x
        self.parts = (self.x, y)
        if crossing["weights"] == "sample":
            self.parts += ({"a": weight, "b": weight[::-1].copy()} if two else weight,)

    def rows(self, some):
        return keras.tree.map_structure(lambda part: part[some], self.parts)

    def batches(self, order=None):
        yield from map(self.rows, chunks(self.crossing, np.arange(self.count) if order is None else order))

    @property
    def steps(self):
        return len(list(self.batches()))

    def given(self, kind, *, labels=True):
        """Returns the arguments of `fit`, `evaluate` or `predict` for the data."""
        if kind in ("arrays", "shuffled_by_keras"):
            if not labels:
                return {"x": self.x, "batch_size": self.batch}
            weight = {"sample_weight": self.parts[2]} if len(self.parts) > 2 else {}
            return {"x": self.x, "y": self.parts[1], "batch_size": self.batch, **weight}
        return {"x": self.form(kind)}

    def form(self, kind):
        sliced = tf.data.Dataset.from_tensor_slices(self.parts)
        if kind == "generator":
            return (batch for _ in itertools.count() for batch in self.batches())
        if kind in ("dataset_of_generator", "uneven_batches"):
            signature = keras.tree.map_structure(
                lambda part: tf.TensorSpec((None, *part.shape[1:]), part.dtype), self.parts
            )
            return tf.data.Dataset.from_generator(self.batches, output_signature=signature)
        if kind.startswith("pydataset"):
            return Sequence(self, reordered=kind.endswith("reordered"))
        return {
            "dataset": lambda: sliced.batch(self.batch),
            "unknown_length": lambda: sliced.filter(lambda *_: True).batch(self.batch),
            "shuffled": lambda: sliced.shuffle(self.count).batch(self.batch).prefetch(2),
            "dropped": lambda: sliced.batch(self.batch, drop_remainder=True),
            "repeated": lambda: sliced.repeat().batch(self.batch),
            "batches_repeated": lambda: sliced.shuffle(self.count, seed=2).batch(self.batch).repeat(),
            "zipped": lambda: tf.data.Dataset.zip(
                *(
                    tf.data.Dataset.from_tensor_slices(part).repeat(1 + bool(number))
                    for number, part in enumerate(self.parts)
                )
            ).batch(self.batch),
            "cached": lambda: sliced.cache().shuffle(4, seed=1).map(lambda *each: each).batch(self.batch),
        }[kind]()


class Sequence(keras.utils.PyDataset):
    def __init__(self, examples, *, reordered):
        super().__init__()
        self.examples, self.reordered, self.order = examples, reordered, np.arange(examples.count)

    def __len__(self):
        return self.examples.steps

    def __getitem__(self, number):
        batch = self.examples.batch
        return self.examples.rows(self.order[batch * number : batch * (number + 1)])

    def on_epoch_end(self):
        if self.reordered:
            self.order = self.order[::-1].copy()


class Step:
    """What the models' classes have in common: a `train_step` of one's own, or not."""


class Own(Step):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out, weight, training=True)
            scaled = self.optimizer.scale_loss(loss)
        grads = self.changed(tape.gradient(scaled, self.trainable_variables))
        self.optimizer.apply(grads, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        return self.compute_metrics(x, y, out, weight)

    def changed(self, grads):
        return grads


class Clipped(Own):
    def changed(self, grads):
        return tf.clip_by_global_norm(grads, 0.05)[0]


class OwnTracked(Step):
    tracker = None

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight, training=True)
            scaled = self.optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"error": self.tracker.result(), "now": loss}

    @property
    def metrics(self):
        return [*super().metrics, *([self.tracker] if self.tracker is not None else [])]


class TwoOptimizers(Step):
    other = None

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight, training=True)
            scaled, otherwise = self.optimizer.scale_loss(loss), self.other.scale_loss(loss)
        last = self.layers[-1].trainable_variables
        first = [v for v in self.trainable_variables if not any(v is each for each in last)]
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, first), first, strict=True))
        self.other.apply_gradients(zip(tape.gradient(otherwise, last), last, strict=True))
        return {"loss": loss}


class ComputesLoss(Step):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(keras.tree.flatten(y_pred)[0]))


class WithoutCall(keras.Model):
    """A model that can't be called: its steps call a network of its own."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.total = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.total]

    def loss_of(self, data, *, training):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        error = ops.mean(ops.square(self.network(x, training=training) - y), axis=-1)
        return ops.mean(error if weight is None else error * ops.reshape(weight, (-1,)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data, training=True)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    def test_step(self, data):
        self.total.update_state(self.loss_of(data, training=False))
        return {"loss": self.total.result()}

    def predict_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        return self.network(x, training=False)


STEPS = {
    "keras": Step,
    "own": Own,
    "own_tracked": OwnTracked,
    "clipped": Clipped,
    "two_optimizers": TwoOptimizers,
    "without_call": Step,
    "compute_loss": ComputesLoss,
}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.note, self.first, self.last = Note(), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")

    def call(self, x):
        return self.last(self.first(self.note(x)))


class Counting(layers.Layer):
    """Counts the steps that it trained in."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
        return x


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def network(crossing, *, plain):
    kind, step = crossing["model"], STEPS[crossing["step"]]
    if kind == "subclassed":
        return type("OfAStep", (step, Subclassed), {})()
    if kind == "unbuilt":
        return type("OfAStep", (step, keras.Sequential), {})(
            [Note(), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")]
        )
    model = type("OfAStep", (step, keras.Model), {})
    given = keras.Input((1 + FEATURES,), name="values", dtype="int32" if "words" in kind else "float32")
    x = Note()(given)
    if kind == "words":
        x = layers.Embedding(20, 4, mask_zero=True)(x)
        return model(given, layers.Dense(1, "sigmoid")(x))
    if kind == "pooled_words":
        x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4, mask_zero=True)(x))
        return model(given, layers.Dense(1, "sigmoid")(x))
    regularizer = keras.regularizers.L2(0.01) if kind == "regularised" else None
    wide = crossing["state"] == "powersgd"  # So that it sends less at a rank at which it is exact.
    first = layers.Dense(64 if wide else 8, activation="tanh", kernel_regularizer=regularizer)
    x = first(x)
    # Plain Keras can't trace it in `fit`; its numbers are those without it.
    with keras.RematScope("full" if kind == "recompute" and not plain else None):
        x = (layers.Dense if plain or kind != "sharded" else toolkit.parallel.ShardedDense)(
            64 if wide else 6, name="middle"
        )(x)
    first.trainable = kind != "frozen"
    if kind == "normalised":
        x = layers.BatchNormalization(synchronized=True, momentum=0.7)(x)
    if kind in ("counting", "adds_loss"):
        x = {"counting": Counting, "adds_loss": AddsLoss}[kind]()(x)
    if kind == "two_outputs":
        return model(given, {name: layers.Dense(1, "sigmoid", name=name)(x) for name in ("a", "b")})
    out = layers.Dense(1, "sigmoid")(x)
    return model({"values": given} if kind == "dict" else given, out)


def squared(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


def whole_mean(y, p):
    return ops.mean(ops.square(y - p))


def coupled(y, p):
    return ops.mean(ops.square(y - p)) + ops.sqrt(ops.mean(ops.square(p - ops.mean(p, axis=0))) + 0.1)


def masked(y, p):
    there = ops.cast(y >= 0, p.dtype)
    return ops.sum(there * ops.square(y - p)) / (ops.sum(there) + 1e-3)


def loss_of(crossing):
    return {
        "mse": lambda: "mse",
        "crossentropy": keras.losses.BinaryCrossentropy,
        "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
        "mean_of_weights": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        "function": lambda: squared,
        "scalar": lambda: whole_mean,
        "coupled": lambda: coupled,
        "masked": lambda: masked,
        "dice": lambda: keras.losses.Dice(axis=None),
    }[crossing["loss"]]()


class Positives(keras.metrics.Metric):
    """Counts labels."""

    def __init__(self):
        super().__init__(name="positives")
        self.n = self.add_weight(shape=(), initializer="zeros", name="n")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.n.assign_add(ops.sum(ops.cast(y_true > 0, "float32")))

    def result(self):
        return self.n


class Largest(keras.metrics.Metric):
    """The largest prediction, whose state is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self):
        return self.most


class Vector(keras.metrics.Metric):
    """Sums of two kinds, as one vector or by name."""

    def __init__(self, *, named):
        super().__init__(name="two")
        self.named, self.sums = named, self.add_weight(shape=(2,), initializer="zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add(ops.stack([ops.sum(y_pred), ops.sum(y_pred * ops.cast(y_true > 0, y_pred.dtype))]))

    def result(self):
        return {"all": self.sums[0], "positive": self.sums[1]} if self.named else self.sums * 1.0


def metrics_of(crossing):
    made = {
        None: list,
        "mae": lambda: ["mae"],
        "weighted": lambda: [keras.metrics.MeanAbsoluteError(name="weighted")],
        "function": lambda: [whole_mean],
        "counting": lambda: [Positives()],
        "largest": lambda: [Largest()],
        "vector": lambda: [Vector(named=False)],
        "dict": lambda: [Vector(named=True)],
        "f1": lambda: [keras.metrics.F1Score(average="macro", threshold=0.5, name="f1")],
        "auc": lambda: [keras.metrics.AUC(num_thresholds=11, name="auc")],
    }[crossing["metrics"]]()
    made = {"a": made} if crossing["model"] == "two_outputs" else made
    return {"weighted_metrics" if crossing["metrics"] == "weighted" else "metrics": made} if crossing["metrics"] else {}


def optimizer_of(crossing, rate=0.1):
    rate = keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.7) if crossing["rate"] == "schedule" else rate
    tweak = {
        "accumulation": {"gradient_accumulation_steps": 2},
        "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
        "clipnorm": {"clipnorm": 0.02},
        "global_clipnorm": {"global_clipnorm": 0.05},
    }.get(crossing["tweak"], {})
    # Where a gradient is nearly nothing, Adam magnifies its last digits, unless epsilon is large.
    made = (
        keras.optimizers.Adam(rate, epsilon=0.1, **tweak)
        if crossing["optimizer"] == "adam"
        else keras.optimizers.SGD(rate, momentum=0.0 if crossing["state"] == "local" else 0.9, **tweak)
    )
    if crossing["tweak"] == "loss_scale":
        return keras.optimizers.LossScaleOptimizer(made, initial_scale=64.0)
    return made


def model_of(crossing, strategy):
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy(crossing["precision"])
    with strategy.scope():
        model = network(crossing, plain=not made_by_toolkit(strategy))
        if crossing["step"] == "without_call":
            model = WithoutCall(model)
        if crossing["step"] == "own_tracked":
            model.tracker = keras.metrics.Mean("error")
        compiled(model, crossing)
    return model


def compiled(model, crossing):
    given = {} if crossing["step"] == "without_call" else {"loss": loss_of(crossing), **metrics_of(crossing)}
    if crossing["model"] == "two_outputs":
        given["loss"] = {"a": given["loss"], "b": "mse"}
        given["loss_weights"] = {"a": 1.0, "b": 0.3}
    if crossing["step"] == "two_optimizers":
        model.other = optimizer_of(crossing, 0.05)
    model.compile(
        optimizer_of(crossing), steps_per_execution=crossing["several"], run_eagerly=crossing["eager"], **given
    )


def made_by_toolkit(strategy):
    return getattr(strategy, "made_by_toolkit", False)


def flat(logs):
    return {
        name: np.ravel(np.asarray(keras.ops.convert_to_numpy(value), np.float64)).tolist()
        for name, value in (logs or {}).items()
    }


class Reader(keras.callbacks.Callback):
    """Reads something while the model trains, and does what scripts do with it."""

    def __init__(self, crossing, examples, data, readings, *, chief):
        super().__init__()
        self.kind, self.examples, self.data, self.readings = crossing["reader"], examples, data, readings
        self.chief = chief

    def on_train_batch_end(self, batch, logs=None):
        if self.kind == "logs":
            self.readings.append({"batch": [batch], **flat(logs)})
        elif self.kind == "iterations":
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            self.readings.append({"iterations": [int(self.model.optimizer.iterations)], "rate": [rate]})
        elif self.kind == "weights":
            self.readings.append({"weights": [float(sum(np.sum(each) for each in self.model.get_weights()))]})
        elif self.kind == "stop_training" and batch == 1 and self.epoch == 1:
            self.model.stop_training = True

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        phase, NOTED.phase = NOTED.phase, None
        if self.kind == "evaluate":
            self.readings.append(
                flat(self.model.evaluate(**self.examples.given("arrays"), verbose=0, return_dict=True))
            )
        elif self.kind == "predict":
            out = self.model.predict(**self.examples.given("arrays", labels=False), verbose=0)
            self.readings.append({"predicted": np.ravel(keras.tree.flatten(out)[0]).tolist()})
        elif self.kind == "data" and self.chief and isinstance(self.data, tf.data.Dataset):
            next(iter(self.data))  # For a picture.
        NOTED.phase = phase


class Stop(keras.callbacks.Callback):
    """Stops a run at a moment: by SIGTERM to the last of several processes, or by an error in each of them."""

    def __init__(self, kind, times, here):
        super().__init__()
        self.kind, self.at, self.here, self.step = kind, (4 if kind == "error" else 2) + 2 * times, here, 0

    def _at(self, kind):
        if self.kind != kind or not self.here:
            return
        if kind == "error":
            raise InterruptedError("a mistake in a callback")
        os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_begin(self, batch, logs=None):
        self.step += 1
        if self.step == self.at:
            self._at("batch_begins")

    def on_train_batch_end(self, batch, logs=None):
        if self.step == self.at:
            for kind in ("batch", "error", "twice"):
                self._at(kind)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self._at("epoch_end")

    def on_test_batch_begin(self, batch, logs=None):
        self._at("validation")


def callbacks_of(crossing, call, examples, data, readings, folder, *, chief):
    cb = keras.callbacks
    made = {
        "early_stopping": lambda: [cb.EarlyStopping("loss", min_delta=10, patience=1, restore_best_weights=True)],
        "plateau": lambda: [cb.ReduceLROnPlateau("loss", min_delta=10, patience=1, cooldown=0)],
        "scheduler": lambda: [cb.LearningRateScheduler(lambda _, rate: float(rate) * 0.5)],
        "checkpoint": lambda: [cb.ModelCheckpoint(f"{folder}/{call}.weights.h5", save_weights_only=True, save_freq=2)],
        "backup": lambda: [cb.BackupAndRestore(f"{folder}/{call}-backup")],
    }.get(crossing["reader"], list)()
    return [Phases(call), *made, Reader(crossing, examples, data, readings, chief=chief)]


def validation_of(crossing, examples):
    kind = crossing["validation"]
    if kind is None or kind == "split":
        return {"validation_split": SPLIT} if kind else {}
    form = crossing["data"] if kind in ("alike", "one_step") else "arrays"
    more = {"validation_freq": 2} if kind == "second_epochs" else {}
    if kind == "one_step":
        more["validation_steps"] = 1
    elif form in ENDLESS:
        more["validation_steps"] = examples.steps
    if form in ("arrays", "shuffled_by_keras"):
        return {"validation_data": examples.parts, "validation_batch_size": examples.batch, **more}
    return {"validation_data": examples.form(form), **more}


def fitted(crossing, strategy, folder, record):
    """Calls `fit` once or twice, in a Run or not, stopped and gone on with."""
    calls = (EPOCHS - 1, EPOCHS - 1) if crossing["call"] in ("fit_twice", "recompiled") else (EPOCHS,)
    stop = crossing["stop"] if made_by_toolkit(strategy) else None
    stops = {None: 0, "run": 0, "twice": 2}.get(stop, 1)
    task = getattr(strategy.cluster_resolver, "task_id", 0) if strategy.cluster_resolver else 0
    tasks = len(strategy.cluster_resolver.cluster_spec().as_dict()["worker"]) if strategy.cluster_resolver else 1
    for tried in range(stops + 1):
        stopping = Stop(stop, tried, here=task == tasks - 1 or stop == "error") if tried < stops else None
        train, test = examples_of(crossing)
        model = model_of(crossing, strategy)
        record["history"], record["readings"] = [], []

        def fit_all(fit, model=model, train=train, test=test, stopping=stopping):
            data = None
            for number, epochs in enumerate(calls):
                if number and crossing["call"] == "recompiled":
                    with strategy.scope():
                        compiled(model, crossing)
                if data is None or crossing["data"] == "generator":
                    data = train.given(crossing["data"])
                steps = crossing["steps"] or (train.steps if crossing["data"] in ENDLESS else None)
                more = {"class_weight": {0: 1.0, 1: 2.0}} if crossing["weights"] == "class" else {}
                callbacks = callbacks_of(
                    crossing, f"fit {number}", test, data["x"], record["readings"], folder, chief=task == 0
                ) + ([stopping] if stopping else [])
                history = fit(
                    model,
                    **data,
                    epochs=epochs,
                    steps_per_epoch=steps,
                    shuffle=crossing["data"] == "shuffled_by_keras",
                    verbose=0,
                    callbacks=callbacks,
                    **validation_of(crossing, test),
                    **more,
                )
                record["history"].append({k: np.asarray(v, np.float64).tolist() for k, v in history.history.items()})

        if stop is None:
            fit_all(keras.Model.fit)
            return model
        try:
            with toolkit.training.Run(
                f"{folder}/run",
                resume="auto" if stop == "error" else bool(tried),
                recipe="crossing",
                checkpoint_steps=2 * (stop == "error"),
            ) as run:
                fit_all(lambda model, run=run, **given: run.fit(model, **given))
            if task == 0:
                record["summary steps"] = run.summary["steps"]
            return model
        except (toolkit.errors.StoppedBySignal, InterruptedError) as error:
            if tried >= stops:
                raise
            record.setdefault("stopped", []).append(f"{type(error).__name__}: {error}")
            NOTED.phase = None
    raise AssertionError("never gone on with")


def examples_of(crossing):
    return (
        Examples(crossing, crossing["sizes"][0], 0, seed=4),
        Examples(crossing, VALIDATED, FIRST_VALIDATED, seed=6),
    )


def called(crossing, strategy, record):
    """Does what isn't `fit`."""
    train, test = examples_of(crossing)
    model = model_of(crossing, strategy)
    call = crossing["call"]
    more = {"steps": train.steps} if crossing["data"] in ENDLESS else {}
    if call == "evaluate":
        given = train.given(crossing["data"])
        found = [model.evaluate(**given, **more, verbose=0, return_dict=True, callbacks=[Phases(call)])]
    elif call == "predict":
        given = train.given(crossing["data"], labels=False)
        found = [{"out": np.concatenate([np.ravel(each) for each in keras.tree.flatten(
            model.predict(**given, **more, verbose=0, callbacks=[Phases(call)]))])}]  # fmt: skip
    else:
        found = []
        for epoch in range(2):
            NOTED.phase = f"on_batch {epoch}"
            for batch in train.batches():
                given = dict(zip(("x", "y", "sample_weight"), batch, strict=False))
                if crossing["weights"] == "class":
                    given["class_weight"] = {0: 1.0, 1: 2.0}
                found.append(model.train_on_batch(**given, return_dict=True))
            NOTED.phase = None
            given = dict(zip(("x", "y", "sample_weight"), test.parts, strict=False))
            found.append(model.test_on_batch(**given, return_dict=True))
            out = model.predict_on_batch(test.x)
            found.append({"out": np.concatenate([np.ravel(each) for each in keras.tree.flatten(out)])})
    record["history"] = [flat(each) for each in found]
    return model


def seen(crossing, strategy, folder):
    """Does what a crossing says; returns what came of it, as JSON may hold it."""
    keras.utils.clear_session(free_memory=False)
    NOTED.__init__(replicated=strategy.num_replicas_in_sync > 1)
    record = {"stopped": [], "readings": []}
    try:
        if crossing["call"] in ("fit", "fit_twice", "recompiled"):
            model = fitted(crossing, strategy, folder, record)
        else:
            model = called(crossing, strategy, record)
    except Exception as error:
        place = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        where = f"{pathlib.Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}"
        return record | {"error": f"{type(error).__name__} at {where}: {error}"}
    finally:
        NOTED.phase = None
    record["weights"] = [np.ravel(keras.ops.convert_to_numpy(v)).astype(float).tolist() for v in model.variables]
    optimizer = model.optimizer
    record["iterations"] = int(optimizer.iterations) if optimizer is not None and optimizer.built else 0
    record["steps"] = sum(n for phase, n in NOTED.calls.items() if phase.split()[-2] == "train")
    record["used"] = {phase: dict(sorted(counts.items())) for phase, counts in NOTED.used.items() if counts}
    return record


def strategy_for(kind, crossing, devices):
    if kind == "plain":
        return tf.distribute.get_strategy()
    state = crossing["state"]
    return toolkit.strategies.create(
        kind,
        devices=devices[: crossing["replicas"]] if kind == "mirrored" else devices,
        gradients=toolkit.strategies.GradientExchange(compression="powersgd", rank=6) if state == "powersgd" else None,
        local=toolkit.strategies.LocalSteps(every=1) if state == "local" else None,
        optimizer_state="sharded" if state == "zero1" else "replicated",
        check=checked.CHECK,
    )


# What is compared.


def compared(crossing, kind):
    """Returns what of a crossing must be plain Keras's."""
    every = {"history", "weights", "iterations", "used", "readings", "summary steps"}
    for each in KNOWN.values():
        if kind in each.kinds and each.compared and each.has(crossing):
            every &= set(each.compared)
    if crossing["stop"] not in (None, "run"):
        every -= {"readings"}  # Callbacks are called for steps that are passed over, too.
    if crossing["stop"] == "error":
        every -= {"used"}  # Steps after the last checkpoint are done again.
    return every


def differences(many, plain, crossing, kind="mirrored"):
    """Returns what isn't plain Keras's, a line for each; none where plain Keras itself ends in an error."""
    if "error" in plain:
        return []
    if "error" in many:
        return [f"error: {many['error'][:600]}"]
    tolerance = 2e-2 if crossing["precision"] != "float32" else 1e-3 if crossing["state"] == "powersgd" else 2e-5
    found = []
    for key in sorted(compared(crossing, kind)):
        if key == "summary steps":
            if key in many and plain["steps"] != many[key]:
                found.append(f"{key}: {many[key]}, but plain Keras makes {plain['steps']}")
        elif key == "history":
            found += history_differences(many, plain, crossing, tolerance)
        elif key == "used":
            found += used_otherwise(many[key], plain[key], crossing)
        elif key == "iterations":
            if many[key] != plain[key]:
                found.append(f"{key}: {many[key]}, plain {plain[key]}")
        else:
            found += unlike(key, many.get(key), plain.get(key), tolerance)
    return found


def used_otherwise(many, plain, crossing):
    for phase in sorted(set(many) | set(plain)):
        if crossing["stop"] == "validation" and "test" in phase:
            continue  # The validation is made again.
        one, other = ({str(n): times for n, times in each.get(phase, {}).items()} for each in (plain, many))
        if one != other:
            wrong = {n: (other.get(n, 0), one.get(n, 0)) for n in one | other if other.get(n) != one.get(n)}
            yield f"used in {phase}, by example (here, plain): {wrong}"


def differences_of_all(records, plain, crossing, kind):
    """Returns how what processes saw differs from plain Keras: together they are to use each example once."""
    used = collections.defaultdict(collections.Counter)
    for each in records:
        for phase, counts in each.get("used", {}).items():
            used[phase].update(counts)
    found = []
    for task, each in enumerate(records):
        found += [
            f"task {task}: {line}" if len(records) > 1 else line
            for line in differences(each | {"used": used if task == 0 else plain.get("used")}, plain, crossing, kind)
        ]
    return found


def history_differences(many, plain, crossing, tolerance):
    found = []
    for number, (one, other) in enumerate(
        itertools.zip_longest(reversed(plain["history"]), reversed(many["history"]), fillvalue={})
    ):
        if crossing["stop"] in (None, "run"):
            found += unlike(f"history, call {-1 - number}", other, one, tolerance)
            continue
        # A resumed run reports the epochs that it ended.
        for name in one | other if other else ():
            values = other.get(name, [])
            found += unlike(f"history {name}", values, one.get(name, [])[-len(values) :] if values else [], tolerance)
    return found


def unlike(what, many, plain, tolerance):
    """Returns a line if two structures of numbers differ."""
    if paths(many) != paths(plain):
        return [f"{what}: {str(many)[:300]}, plain {str(plain)[:300]}"]
    one, other = (np.asarray(keras.tree.flatten(each), np.float64) for each in (plain, many))
    far = ~np.isclose(other, one, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not far.any():
        return []
    worst = np.argmax(np.where(far, np.abs(other - one), -1))
    return [f"{what}: {far.sum()} of {far.size} differ, such as {other[worst]:.7g}, plain {one[worst]:.7g}"]


def paths(structure):
    return sorted(str(path) for path, _ in keras.tree.flatten_with_path(structure))


# As a program.


def complete(crossing):
    return {
        name: tuple(value) if isinstance(value := crossing.get(name, PLAINEST[name]), list) else value
        for name in DIMENSIONS
    }


def shrunk(crossing, wrong):
    """Returns the plainest crossing that still goes wrong."""
    for name in [*DIMENSIONS, *DIMENSIONS]:
        for value in DIMENSIONS[name]:
            if value == crossing[name]:
                break
            plainer = crossing | {name: value}
            if sensible(plainer) and wrong(plainer):
                crossing = plainer
                break
    return crossing


def changed(crossing):
    """Returns what of a crossing isn't plainest."""
    return {name: value for name, value in crossing.items() if value != PLAINEST[name]}


def here(crossing, devices):
    """Returns how a crossing differs from plain Keras under mirrored, both in this process."""
    with tempfile.TemporaryDirectory() as folder:
        plain = seen(crossing, strategy_for("plain", crossing, devices), f"{folder}/plain")
    if "error" in plain:
        return []
    with tempfile.TemporaryDirectory() as folder:
        return differences(seen(crossing, strategy_for("mirrored", crossing, devices), folder), plain, crossing)


def untuned():
    """Turns tf.data's tuning off, whose thread can make the end of an iterator wait for it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    tf.data.Dataset._apply_debug_options = lambda dataset: dataset.with_options(options)


def main():
    untuned()
    if len(sys.argv) <= 3:
        devices = toolkit.devices.configure(gpus=3, emulate="always").logical_devices
        crossing = complete(json.loads(sys.argv[-1]))
        found = here(crossing, devices)
        if sys.argv[1] == "--shrink" and found:
            crossing = shrunk(crossing, lambda each: here(each, devices))
            found = here(crossing, devices)
        print(json.dumps(changed(crossing)), *found, sep="\n  ")  # noqa: T201
        sys.exit(bool(found))
    kinds, source, out = sys.argv[1:]
    devices = toolkit.devices.configure(gpus=1 if kinds == "multi_worker" else 3, emulate="always").logical_devices
    some = [complete(each) for each in json.loads(pathlib.Path(source).read_text())]
    folder = pathlib.Path(out).parent
    with open(out, "a") as file:
        for kind in kinds.split("+"):
            for number, crossing in enumerate(some):
                own = f"{folder}/{kind}-{number}" if kinds == "multi_worker" else f"{out}-{kind}-{number}"
                file.write(json.dumps(seen(crossing, strategy_for(kind, crossing, devices), own)) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
