"""Small models and steps, drawn at random; the check judges their first step on several replicas.

A model is a list of words, so that Hypothesis prints and shrinks it: the kind of its data, layers, a loss, metrics, an
optimizer, how a batch comes. `judged` builds and fits it.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from toolkit import strategies
from toolkit.strategies.check import watching

L, ops = keras.layers, keras.ops
WIDTH, CLASSES = 4, 3

# Functions of a tensor [n, ...]: by example, along the batch, and of both.
FUNCTIONS = {
    "tanh": ops.tanh,
    "softmax": ops.softmax,
    "softmax over the batch": lambda x: tf.nn.softmax(x, axis=0),
    "minus the mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "minus the example's mean": lambda x: x - ops.mean(x, axis=-1, keepdims=True),
    "by the largest": lambda x: x / (tf.reduce_max(tf.abs(x)) + 1e-2),
    "by the deviation": lambda x: x / (ops.std(x, axis=0) + 1e-1),
    "by the norm": lambda x: x / (tf.norm(x) + 1e-1),
    "the last ones": lambda x: x + x[::-1],
    "rolled": lambda x: x + ops.roll(x, 1, axis=0),
    "rolled within": lambda x: x + ops.roll(x, 1, axis=-1),
    "added up": lambda x: ops.cumsum(x, axis=0) / 10.0,
    "added up within": lambda x: ops.cumsum(x, axis=-1) / 10.0,
    "sorted": lambda x: ops.sort(x, axis=0),
    "the first": lambda x: x + x[:1],
    "by how many": lambda x: x / ops.cast(ops.shape(x)[0], x.dtype),
    "twice": lambda x: ops.concatenate([x, x], axis=0)[: ops.shape(x)[0]] + x,
    "reshaped": lambda x: ops.reshape(ops.reshape(x, (-1,)), ops.shape(x)),
    "clipped": lambda x: tf.clip_by_value(x, -0.5, 0.5),
    "a constant": lambda x: x * tf.constant(np.linspace(0.5, 1.5, WIDTH), x.dtype),
    "rows times rows": lambda x: tf.matmul(x, x, transpose_b=True) @ x / 10.0 if x.shape.rank == 2 else x,
    "noise": lambda x: x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype, seed=3),
}


class Own(L.Layer):
    """A layer of a script's, with a function, a weight and what it adds to the loss."""

    def __init__(self, function, adds):
        super().__init__()
        self.function, self.adds = FUNCTIONS[function], adds

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        found = self.function(x * self.scale)
        if self.adds == "mean":
            self.add_loss(0.1 * ops.mean(ops.square(found)))
        elif self.adds == "sum":
            self.add_loss(0.01 * ops.sum(ops.square(found)))
        elif self.adds == "root":
            self.add_loss(0.1 * ops.sqrt(ops.mean(ops.square(found)) + 0.1))
        return found


def layer(words):
    """A layer of [n, WIDTH] to [n, WIDTH]."""
    kind, *rest = words
    made = {
        "dense": lambda: L.Dense(WIDTH, activation=FUNCTIONS[rest[0]]),
        "activation": lambda: L.Activation(FUNCTIONS[rest[0]]),
        "lambda": lambda: L.Lambda(FUNCTIONS[rest[0]]),
        "own": lambda: Own(*rest),
        "dropout": lambda: L.Dropout(0.4),
        "noise": lambda: L.GaussianNoise(0.2),
        "alpha": lambda: L.AlphaDropout(0.2),
        "batch normalisation": lambda: L.BatchNormalization(momentum=0.5),
        "layer normalisation": L.LayerNormalization,
        "unit normalisation": lambda: L.UnitNormalization(axis=rest[0]),
        "softmax": lambda: L.Softmax(axis=rest[0]),
        "regularized": lambda: L.Dense(WIDTH, kernel_regularizer="l2", activity_regularizer=rest[0]),
        "spectral": lambda: L.SpectralNormalization(L.Dense(WIDTH)),
        "wrapped": lambda: keras.Sequential([L.Dense(WIDTH), L.Activation(FUNCTIONS[rest[0]])]),
    }
    return made[kind]()


def body(model):
    """From a batch's component to [n, WIDTH]."""
    inside = {
        "last": lambda: [L.LSTM(WIDTH)],
        "gru": lambda: [L.GRU(WIDTH, recurrent_dropout=0.2)],
        "mean": lambda: [L.GlobalAveragePooling1D()],
        "max": lambda: [L.GlobalMaxPooling1D()],
        "each": lambda: [
            L.TimeDistributed(L.Dense(WIDTH, activation=FUNCTIONS[model.inner])),
            L.GlobalAveragePooling1D(),
        ],
        "both ways": lambda: [L.Bidirectional(L.SimpleRNN(2))],
        "convolved": lambda: [L.Conv1D(WIDTH, 2, padding="causal"), L.GlobalAveragePooling1D()],
    }
    if model.data == "numbers":
        return [keras.Input((6,)), L.Dense(WIDTH)]
    if model.data == "images":
        return [
            keras.Input((4, 4, 2)),
            L.RandomFlip(seed=1),
            L.Conv2D(WIDTH, 3, padding="same"),
            L.BatchNormalization() if model.inner == "tanh" else L.SpatialDropout2D(0.3),
            L.GlobalAveragePooling2D(),
        ]
    return [keras.Input((5,), dtype="int32"), L.Embedding(9, WIDTH, mask_zero=model.masks), *inside[model.sequence]()]


def dice(y, p):
    """Is neither a mean nor a sum over examples."""
    y, p = ops.cast(ops.reshape(y, (-1, 1)), p.dtype), ops.mean(p, -1, keepdims=True)
    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p * p) + 1)


LOSSES = {
    "classes": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "classes, a sum": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    "huber": lambda: lambda y, p: ops.mean(keras.losses.huber(ops.one_hot(ops.cast(y, "int32"), CLASSES), p)),
    "by example": lambda: lambda y, p: ops.mean(ops.square(p - ops.cast(ops.reshape(y, (-1, 1)), p.dtype)), -1),
    "dice": lambda: dice,
    "root": lambda: lambda y, p: ops.sqrt(ops.mean(ops.square(p - ops.cast(ops.reshape(y, (-1, 1)), p.dtype))) + 0.1),
}


class Largest(keras.metrics.Metric):
    """No sum over examples."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.cast(ops.max(y_pred), self.value.dtype)))

    def result(self):
        return self.value + 0.0


METRICS = {
    "accuracy": lambda: "accuracy",
    "largest": Largest,
    "function": lambda: lambda _, p: ops.mean(p),
    "spread": lambda: lambda _, p: ops.std(p),
    "top": lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top"),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped each": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "averaged": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}

STEP_LOSSES = {
    "mean": lambda each, _: tf.reduce_mean(each),
    "sum by size": lambda each, _: tf.reduce_sum(each) / tf.cast(tf.shape(each)[0], each.dtype),
    "sum": lambda each, _: tf.reduce_sum(each) / 8.0,
    "root": lambda each, _: tf.sqrt(tf.reduce_mean(each) + 0.1),
    "largest": lambda each, _: tf.reduce_logsumexp(each),
    "hard ones": lambda each, _: (
        tf.reduce_sum(tf.where(each > 1.0, each, 0.0)) / (tf.reduce_sum(tf.cast(each > 1.0, each.dtype)) + 1.0)
    ),
    "apart": lambda each, p: tf.reduce_mean(each) + tf.reduce_mean(tf.matmul(p, p, transpose_b=True) ** 2),
    "with statistics": lambda each, p: tf.reduce_mean(each) + tf.reduce_mean(tf.math.reduce_std(p, axis=0)),
    "half": lambda each, _: tf.reduce_mean(each[::2]),
    "and a mean": lambda each, p: tf.reduce_mean(each) + tf.reduce_mean(tf.reduce_mean(p, 0) ** 2),
}


class OwnStep(keras.Sequential):
    """A step of a script's."""

    how = "mean"

    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            each = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
            each = each if w is None else each * tf.cast(w, each.dtype)
            loss = STEP_LOSSES[self.how](each, p) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {"loss": loss, "largest": tf.reduce_max(p), "size": tf.shape(p)[0], "mean": tf.reduce_mean(p)}


@dataclasses.dataclass(frozen=True)
class Model:
    """What is drawn."""

    data: str
    layers: tuple
    loss: str
    metrics: tuple
    optimizer: str
    step: str
    weighted: bool
    masks: bool
    inner: str
    sequence: str
    batch: int
    known_size: bool
    replicas: int
    dtype: str


names = st.sampled_from(sorted(FUNCTIONS))
layers = st.one_of(
    st.tuples(st.sampled_from(["dense", "activation", "lambda", "wrapped"]), names),
    st.tuples(st.just("own"), names, st.sampled_from(["", "mean", "sum", "root"])),
    st.tuples(st.sampled_from(["dropout", "noise", "alpha", "batch normalisation", "layer normalisation", "spectral"])),
    st.tuples(st.sampled_from(["softmax", "unit normalisation"]), st.sampled_from([0, 1])),
    st.tuples(st.just("regularized"), st.sampled_from(["l1", "l2"])),
)
models = st.builds(
    Model,
    data=st.sampled_from(["numbers", "words", "images"]),
    layers=st.lists(layers, max_size=3).map(tuple),
    loss=st.sampled_from(sorted(LOSSES)),
    metrics=st.lists(st.sampled_from(sorted(METRICS)), max_size=2, unique=True).map(tuple),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    step=st.sampled_from(["keras", "keras", *sorted(STEP_LOSSES)]),
    weighted=st.booleans(),
    masks=st.booleans(),
    inner=names,
    sequence=st.sampled_from(["last", "gru", "mean", "max", "each", "both ways", "convolved"]),
    batch=st.integers(2, 9),
    known_size=st.booleans(),
    replicas=st.integers(2, 3),
    dtype=st.sampled_from(["float32", "float64"]),
)


def judged(model):
    """What comes of the first steps of a model, or None where one device can't make them either."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.config.set_floatx(model.dtype)
    keras.config.set_dtype_policy(model.dtype)
    try:
        return _judged(model)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def _judged(model):
    strategy = strategies.create("mirrored", devices=[f"CPU:{n}" for n in range(model.replicas)])
    own = model.step != "keras"
    with strategy.scope():
        parts = [*body(model), *(layer(words) for words in model.layers), L.Dense(CLASSES)]
        made = (OwnStep if own else keras.Sequential)(parts)
        made.how = model.step
        # TensorFlow ranks no float64.
        possible = [name for name in model.metrics if (name, model.dtype) != ("top", "float64")]
        metrics = None if own else [METRICS[name]() for name in possible]
        made.compile(OPTIMIZERS[model.optimizer](), LOSSES[model.loss](), metrics=metrics, jit_compile=False)
    random = np.random.default_rng(0)
    count = model.batch
    x = {
        "numbers": lambda: random.normal(size=(count, 6)).astype(model.dtype),
        "images": lambda: random.normal(size=(count, 4, 4, 2)).astype(model.dtype),
        "words": lambda: random.integers(0, 9, (count, 5)).astype("int32"),
    }[model.data]()
    parts = [x, random.integers(0, CLASSES, count)]
    if model.weighted:
        parts.append(random.uniform(0.2, 2.0, count).astype(model.dtype))
    data = tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(count, drop_remainder=model.known_size)
    with watching.watched() as session:
        made.fit(data, verbose=0)
        made.predict(data.map(lambda *each: each[0]), verbose=0)
    return session.steps
