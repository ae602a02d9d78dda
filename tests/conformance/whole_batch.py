"""Losses of steps of one's own, and layers, that look at the batch as a whole, as published or as people write them."""

import keras
import tensorflow as tf
from keras import layers, ops

BATCH = 16


def negatives(m, x, y):
    """In-batch negatives with a learnt scale, as CLIP and NT-Xent have them."""
    scores = m.scale * tf.matmul(m.net(x), m.net(y), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores))


def supervised(m, x, y):
    """SupCon: positives are the examples of the same class in the batch."""
    z = tf.math.l2_normalize(m.net(x), -1)
    same = tf.cast(y[:, :1] > 0, tf.float32)
    same = tf.matmul(same, same, transpose_b=True) + tf.matmul(1 - same, 1 - same, transpose_b=True)
    share = tf.nn.log_softmax(m.scale * tf.matmul(z, z, transpose_b=True))
    return -tf.reduce_mean(tf.reduce_sum(share * same, -1) / tf.reduce_sum(same, -1))


def barlow(m, x, y):
    a, b = m.head(m.net(x)), m.head(m.net(y))
    norm = lambda v: (v - tf.reduce_mean(v, 0)) / (tf.math.reduce_std(v, 0) + 0.1)  # noqa: E731
    c = tf.matmul(norm(a), norm(b), transpose_a=True) / tf.cast(tf.shape(a)[0], tf.float32)
    return m.scale * tf.reduce_sum((c - tf.eye(4)) ** 2)


def vicreg(m, x, y):
    a, b = m.net(x), m.net(y)
    spread = tf.reduce_mean(tf.nn.relu(1 - tf.sqrt(tf.math.reduce_variance(a, 0) + 1e-4)))
    centred = a - tf.reduce_mean(a, 0)
    c = tf.matmul(centred, centred, transpose_a=True) / tf.cast(tf.shape(a)[0] - 1, tf.float32)
    return (
        tf.reduce_mean((a - b) ** 2) + spread + 0.04 * tf.reduce_sum((c - tf.linalg.diag(tf.linalg.diag_part(c))) ** 2)
    )


def hardest(m, x, y):
    a, b = m.net(x), m.net(y)
    distances = tf.reduce_sum((a[:, None] - b[None]) ** 2, -1)
    away = distances + 1e3 * tf.eye(tf.shape(a)[0])
    return tf.reduce_mean(tf.nn.relu(tf.linalg.diag_part(distances) - tf.reduce_min(away, 1) + 1.0))


def mixup(m, x, y):
    """Between two layers, with the batch reversed, and a rate for the whole batch."""
    h = m.net(0.7 * x + 0.3 * x[::-1])
    h = 0.7 * h + 0.3 * h[::-1]
    return tf.sqrt(tf.reduce_mean((m.head(h) - y[:, :4]) ** 2))


def masked(m, x, y):
    kept = y[:, :1] > 0.5
    return tf.reduce_sum(tf.where(kept, m.net(x), 0.0)) / tf.reduce_sum(tf.cast(kept, tf.float32))


def by_batch(m, x, y):
    return tf.reduce_sum((m.net(x) - y[:, :4]) ** 2) / BATCH


def adversarial(m, x, y):
    """Real and made examples in one call, compared with the mean of the real ones."""
    real, made = tf.split(m.head(m.net(tf.concat([x, y], 0))), 2)
    return tf.reduce_mean(tf.math.softplus(made - tf.reduce_mean(real, 0)))


def plain(m, x, y):
    return tf.reduce_mean((m.head(m.net(x)) - y[:, :4]) ** 2)


def penalised(m, x, y):
    """A gradient by a tensor, in a loss that is differentiated again, as WGAN-GP has it."""
    mixed = 0.5 * x + 0.5 * y
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        out = m.net(mixed)
        value = tf.reduce_sum(out * tf.nn.softmax(out, 0))
    norm = tf.norm(tape.gradient(value, mixed), axis=1)
    return tf.reduce_mean((norm - 1) ** 2) + tf.reduce_mean(m.net(x))


class Own(keras.Model):
    """A step of its own, tested by another of its own."""

    def __init__(self, of):
        super().__init__()
        self.of = of
        self.net = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(4)])
        self.head = keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="tanh"), layers.Dense(4)])
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.track = keras.metrics.Mean("own")
        self.seen = keras.metrics.Sum("seen")

    @property
    def metrics(self):
        return [self.track, self.seen]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.of(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = [(g, v) for g, v in zip(gradients, self.trainable_variables, strict=True) if g is not None]
        gradients, _ = tf.clip_by_global_norm([g for g, _ in pairs], 1.0)
        self.optimizer.apply(gradients, [v for _, v in pairs])
        self.track.update_state(loss)
        self.seen.update_state(tf.ones_like(x[:, 0]))
        return {"own": self.track.result(), "raw": loss, "seen": self.seen.result()}

    def test_step(self, data):
        self.track.update_state(self.of(self, *data))
        self.seen.update_state(tf.ones_like(data[0][:, 0]))
        return {"own": self.track.result(), "seen": self.seen.result()}


class Router(layers.Layer):
    """A mixture of experts, whose balance is a product of two means over the batch."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = layers.Dense(3), [layers.Dense(4, "tanh") for _ in range(3)]

    def call(self, x):
        p = ops.softmax(self.gate(x))
        hot = ops.one_hot(ops.argmax(p, -1), 3)
        self.add_loss(3 * ops.sum(ops.mean(hot, 0) * ops.mean(p, 0)))
        return sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))


class ActNorm(layers.Layer):
    """Begins with the statistics of its first batch."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros")
        self.ready = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        first = -ops.mean(x, 0)
        self.shift.assign(ops.where(self.ready > 0, self.shift, first))
        self.ready.assign(ops.ones(()))
        return x + self.shift


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, 0)


class Looped(layers.Layer):
    """Calls a layer in a loop over the rows of the whole batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return tf.scan(lambda before, row: 0.5 * before + self.dense(row[None])[0], x)


class Counter(layers.Layer):
    def build(self, _):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.n.assign_add(ops.sum(ops.ones_like(x[:, 0])))
        return x


def gram(x):
    return 0.01 * ops.sum(ops.matmul(x, ops.transpose(x)) ** 2)
