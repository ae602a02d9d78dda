"""Models whose weights are in shards, trained by one process or by one of several workers.

python sharded_weights.py OUT.npz WEIGHTS CASE ...

A CASE is a model and an optimizer, such as vit/adamw. All is in float64, where rounding doesn't hide a mistake. Of
several workers, OUT.npz also says how often a step gathers.
"""

import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import toolkit
from toolkit.strategies.mesh import Among
from toolkit.strategies.step import collectives

L = keras.layers
RANDOM = np.random.default_rng(0)
ROWS, BATCH, EPOCHS = 37, 8, 4  # 20 steps, and every fifth batch has 5 examples.
PICTURES = RANDOM.normal(size=(ROWS, 8, 8, 3))
VECTORS = RANDOM.normal(size=(ROWS, 48))
SERIES = RANDOM.normal(size=(ROWS, 6, 20))
WORDS = RANDOM.integers(0, 300, size=(ROWS, 6))
LABELS = RANDOM.integers(0, 4, size=ROWS)


class Scaled(L.Layer):
    """A layer of one's own, with a weight that is read twice and one that no call of another layer reads."""

    def __init__(self, units):
        super().__init__()
        self.units, self.inner = units, L.Dense(units, activation="tanh")

    def build(self, shape):
        self.mix = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform", name="mix")
        self.scale = self.add_weight(shape=(self.units,), initializer="ones", name="scale")
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) * self.scale + keras.ops.matmul(
            keras.ops.tanh(keras.ops.matmul(x, self.mix)), keras.ops.transpose(self.mix)
        )


class Branching(L.Layer):
    """Reads its weight in a branch, and in a loop."""

    def build(self, shape):
        self.mix = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal", name="mix")
        self.flag = self.add_weight(shape=(), initializer="ones", trainable=False, name="flag")

    def call(self, x):
        x = tf.cond(self.flag > 0.5, lambda: tf.matmul(x, self.mix), lambda: x)
        (_, x) = tf.while_loop(lambda n, _: n < 3, lambda n, x: (n + 1, tf.tanh(tf.matmul(x, self.mix))), (0, x))
        return x


class Own(keras.Model):
    """Subclassed, built by its first call; the same layer is called twice, and a weight stands between layers."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = Scaled(48), L.Dense(48), L.Dense(4)
        self.between = self.add_weight(shape=(48, 48), initializer="orthogonal", name="between")

    def call(self, x):
        x = self.again(keras.ops.tanh(self.again(self.first(x))))
        return self.last(keras.ops.matmul(x, self.between))


class Clipped(keras.Model):
    """A step of one's own, which clips gradients by their norm and returns it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.2)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


class Gan(keras.Model):
    """Two networks, each with its optimizer."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((16,)), L.Dense(130, activation="relu"), L.Dense(48)])
        self.judge = keras.Sequential([keras.Input((48,)), L.Dense(60, activation="relu"), L.Dense(1)])
        self.seeds = keras.random.SeedGenerator(5)

    def compile(self, optimizer, other):
        super().compile()
        self.judged, self.made = optimizer, other

    def train_step(self, data):
        noise = keras.random.normal((tf.shape(data)[0], 16), seed=self.seeds, dtype=data.dtype)
        false = self.maker(noise)
        with tf.GradientTape() as tape:
            one = tf.reduce_mean(tf.nn.softplus(self.judge(false)) + tf.nn.softplus(-self.judge(data)))
        variables = self.judge.trainable_variables
        self.judged.apply_gradients(zip(tape.gradient(one, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            two = tf.reduce_mean(tf.nn.softplus(-self.judge(self.maker(noise))))
        variables = self.maker.trainable_variables
        self.made.apply_gradients(zip(tape.gradient(two, variables), variables, strict=True))
        return {"loss": one, "made": two}


def dense(kind=keras.Model):
    given = keras.Input((48,))
    x = L.Dense(50, activation="relu", kernel_regularizer="l2", kernel_constraint="max_norm")(given)
    shared = L.Dense(50, activation="tanh")
    return kind(given, L.Dense(4)(L.Dropout(0.2, seed=3)(shared(shared(x)))))


def conv():
    layers = [keras.Input((8, 8, 3))]
    for filters in (16, 20):
        layers += [L.Conv2D(filters, 3, padding="same", use_bias=False), L.BatchNormalization(), L.ReLU()]
    return keras.Sequential([*layers, L.Flatten(), L.Dense(4)])


def vit():
    given = keras.Input((8, 8, 3))
    x = L.Reshape((16, 48))(L.Conv2D(48, 2, strides=2)(given))
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, 12)(y, y)
        x = x + L.Dense(48)(L.Dense(96, activation="gelu")(L.LayerNormalization()(x)))
    return keras.Model(given, L.Dense(4)(L.GlobalAveragePooling1D()(x)))


def lstm():
    given = keras.Input((6, 20))
    x = L.Bidirectional(L.LSTM(24, return_sequences=True))(given)
    return keras.Model(given, L.Dense(4)(L.GRU(40)(x)))


def odd():
    """What reads weights in branches and loops, or assigns them in a call."""
    given = keras.Input((48,))
    x = Branching()(L.SpectralNormalization(L.Dense(48), power_iterations=2)(given))
    return keras.Model(given, L.Dense(4)(x))


def lora():
    """A frozen base, of which one layer has LoRA weights, which Keras makes in float32."""
    given = keras.Input((48,))
    low, frozen = L.Dense(50, activation="tanh"), L.Dense(50, activation="tanh", trainable=False)
    model = keras.Model(given, L.Dense(4)(frozen(low(given))))
    low.enable_lora(48)
    return model


def int8():
    """Layers of 8 bits with LoRA weights, behind a frozen table."""
    given = keras.Input((6,), dtype="int32")
    low = [L.Dense(80, activation="tanh"), L.EinsumDense("abc,cd->abd", (6, 60), activation="tanh")]
    x = L.Embedding(300, 32, trainable=False)(given)
    for each in low:
        x = each(x)
    for each in low:
        each.quantize("int8")
        each.enable_lora(8)
    return keras.Model(given, L.Dense(4)(L.Flatten()(x)))


def again():
    """Layers that are computed again in the backward pass."""
    with keras.RematScope(mode="full"):
        return dense()


def words():
    given = keras.Input((6,), dtype="int32")
    x = L.TimeDistributed(L.Dense(64))(L.Embedding(300, 32)(given))
    return keras.Model(given, L.Dense(4)(L.Flatten()(x)))


MODELS = {
    "dense": (dense, VECTORS),
    "clipped": (lambda: dense(Clipped), VECTORS),
    "conv": (conv, PICTURES),
    "vit": (vit, PICTURES),
    "lstm": (lstm, SERIES),
    "odd": (odd, VECTORS),
    "lora": (lora, VECTORS),
    "int8": (int8, WORDS),
    "again": (again, VECTORS),
    "words": (words, WORDS),
    "own": (Own, VECTORS),
    "gan": (Gan, VECTORS),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(
        0.003, weight_decay=0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3
    ),
    "each": lambda: keras.optimizers.Adam(0.003, clipnorm=0.05),
    "accumulating": lambda: keras.optimizers.Adam(0.003, gradient_accumulation_steps=2, global_clipnorm=0.5),
    "lamb": lambda: keras.optimizers.Lamb(0.003),
}


class Steps(keras.callbacks.Callback):
    """What each step returns."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([float(logs[name]) for name in sorted(logs)])


def trained(strategy, case, **compiling):
    """A model after EPOCHS, what its steps have returned, and what it has evaluated and predicted."""
    name, optimizer = case.split("/")
    build, x = MODELS[name]
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        with strategy.scope():
            model = build()
            if name == "gan":
                model.compile(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]())
            else:
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(OPTIMIZERS[optimizer](), loss, **{"jit_compile": False, **compiling})
        steps, y = Steps(), [] if name == "gan" else [LABELS]
        model.fit(x, *y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[steps])
        after = (
            () if name == "gan" else (model.evaluate(x, *y, batch_size=BATCH, verbose=0), model.predict(x, verbose=0))
        )
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)  # Which Keras keeps, once it is asked for.
    return model, steps.seen, after


def found(model, seen, after):
    """By name, what must be one device's."""
    slots = [
        v for each in (getattr(model, n, None) for n in ("optimizer", "judged", "made")) if each for v in each.variables
    ]
    weights = [keras.ops.convert_to_numpy(each) for each in (*model.weights, *slots)]
    return {f"{number:03}": np.asarray(each) for number, each in enumerate((np.array(seen), *after, *weights))}


def gathers(strategy):
    """Of a step that trains three layers: how many gathers come before any gradient is computed, and how many after."""
    graphs = []

    class Noting(L.Layer):
        def call(self, x):
            graphs.append(tf.compat.v1.get_default_graph())
            return x

    with strategy.scope():
        layers = [L.Dense(64, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *layers, Noting()])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    model.fit(np.ones((8, 64)), np.ones((8, 64)), batch_size=8, verbose=0)
    operations = graphs[-1].get_operations()
    kept = [each for each in operations if each.type == "CollectiveGather"]
    again = [each for each in kept if any(other.type == "TanhGrad" for other in needed_by(each))]
    return len(kept) - len(again), len(again)


def gathered(strategy, dtype):
    """All workers' shards of seven elements, 0 to 6 of the first and 1 to 7 of the second, as numbers."""

    def gather():
        first = tf.distribute.get_replica_context().replica_id_in_sync_group
        shard = tf.cast(tf.range(7) + first, dtype)
        return tf.cast(collectives.gather_anywhere(shard, among=Among.GROUP), tf.float64)

    return tf.function(lambda: strategy.run(gather))().numpy()


def of_chief(strategy):
    """How many elements of a weight are the chief's, of which each worker draws others. A shard is 1.4 MB and odd."""

    def draw(shape, dtype):
        return tf.reshape(tf.range(701 * 1001, dtype=dtype), shape) + strategy.cluster_resolver.task_id

    with strategy.scope():
        layer = L.Dense(1001, kernel_initializer=draw)
        layer.build((None, 701))
    return (layer.kernel.numpy().ravel() == np.arange(701 * 1001)).sum()


class Snapshots(keras.callbacks.Callback):
    """How many weights a worker keeps whole at the end of an epoch."""

    reads_weights = False

    def __init__(self):
        super().__init__()
        self.kept = 0

    def on_epoch_end(self, epoch, logs=None):
        self.kept += sum(each._snapshot is not None for each in self.model.weights if hasattr(each, "_snapshot"))


def saved(strategy, folder):
    """How many wholes workers keep while a run saves; and whether it is resumed, and its files are, bit for bit."""

    def train(directory, epochs):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((48,)), L.Dense(96, activation="tanh"), L.Dense(65), L.Dense(8)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(OPTIMIZERS["each"](), loss, jit_compile=False)
        snapshots = Snapshots()
        file = keras.callbacks.ModelCheckpoint(str(folder / "newest.weights.h5"), save_weights_only=True)
        with toolkit.training.Run(directory, resume=directory.exists(), best="loss") as run:
            given = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "callbacks": [snapshots, file]}
            run.fit(model, VECTORS, LABELS, **given)
        assert not any(each._snapshot for each in model.weights if hasattr(each, "_snapshot"))
        held = [keras.ops.convert_to_numpy(each) for each in (*model.weights, *model.optimizer.variables)]
        return model, held, snapshots.kept

    _, whole, kept = train(folder / "whole", 4)
    train(folder / "parts", 2)
    model, parts, _ = train(folder / "parts", 4)
    keras.backend.clear_session()
    files = [folder / "parts" / name for name in ("model.keras", "best.keras")]
    again = [keras.models.load_model(each).get_weights() for each in files]
    other = keras.models.load_model(files[0])
    other.load_weights(folder / "newest.weights.h5")
    again.append(other.get_weights())
    same = [all(map(np.array_equal, each, model.get_weights())) for each in again]
    return np.array([kept, *map(np.array_equal, whole, parts), *same])


def needed_by(operation):
    """All operations that must have run before one, by its inputs or by what it waits for."""
    found, waiting = {}, [operation]
    while waiting:
        each = waiting.pop()
        for other in [*(tensor.op for tensor in each.inputs), *each.control_inputs]:
            if other not in found:
                found[other] = None
                waiting.append(other)
    return found


def main():
    out, weights, *cases = sys.argv[1:]
    strategy = toolkit.strategies.create("auto", **({"weights": weights} if "TF_CONFIG" in os.environ else {}))
    seen = {f"{case}/{key}": value for case in cases for key, value in found(*trained(strategy, case)).items()}
    if "TF_CONFIG" in os.environ:
        seen["gathers"] = gathers(strategy)
        seen["chiefs"] = of_chief(strategy)
        seen["saved"] = saved(strategy, pathlib.Path(out).parent)
        seen |= {
            f"of {dtype.name}": gathered(strategy, dtype) for dtype in (tf.int8, tf.float16, tf.bfloat16, tf.float64)
        }
    np.savez(out, **seen)


if __name__ == "__main__":
    main()
