"""Models with a train_step of their own, of kinds that people write by Keras's and TensorFlow's guides.

None of them can be called on its data.
"""

import keras
import tensorflow as tf
from keras import layers, ops

import toolkit


def encoder(width=6):
    return keras.Sequential(
        [keras.Input((16, 16, 3)), layers.Conv2D(4, 3, strides=2), layers.LeakyReLU(), layers.Flatten(),
         layers.Dense(width)]
    )  # fmt: skip


def train(model, optimizer, tape, loss, variables):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    model.total.update_state(loss)
    return {"loss": model.total.result()}


class Siamese(keras.Model):
    """A triplet loss of three pictures, by a layer that is called by hand."""

    def __init__(self):
        super().__init__()
        self.embedding = encoder()
        self.total = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        anchor, positive, negative = data[0]
        with tf.GradientTape() as tape:
            near = ops.sum(ops.square(self.embedding(anchor) - self.embedding(positive)), axis=-1)
            far = ops.sum(ops.square(self.embedding(anchor) - self.embedding(negative)), axis=-1)
            loss = ops.mean(ops.maximum(near - far + 0.5, 0.0))
        return train(self, self.optimizer, tape, loss, self.trainable_weights)


def siamese():
    model = Siamese()
    model.compile(keras.optimizers.Adam(1e-3))
    return model


class Quantizer(layers.Layer):
    """A codebook, whose losses it adds by itself; gradients go straight through."""

    def __init__(self, codes, width):
        super().__init__()
        self.codebook = self.add_weight(shape=(width, codes), initializer="random_normal")

    def call(self, x):
        distances = ops.sum(x**2, axis=1, keepdims=True) + ops.sum(self.codebook**2, axis=0) - 2 * x @ self.codebook
        chosen = ops.one_hot(ops.argmin(distances, axis=1), self.codebook.shape[1])
        coded = chosen @ ops.transpose(self.codebook)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(coded) - x) ** 2))
        self.add_loss(ops.mean((coded - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(coded - x)


class VectorQuantized(keras.Model):
    """An autoencoder with a codebook, which reports its layers' losses beside its own."""

    def __init__(self):
        super().__init__()
        decoder = [layers.Dense(768, "sigmoid"), layers.Reshape((16, 16, 3))]
        self.autoencoder = keras.Sequential([encoder(), Quantizer(8, 6), *decoder])
        self.total = keras.metrics.Mean("loss")
        self.codes = keras.metrics.Mean("vq_loss")

    @property
    def metrics(self):
        return [self.total, self.codes]

    def train_step(self, data):
        pictures = data[0]
        with tf.GradientTape() as tape:
            error = ops.mean((self.autoencoder(pictures) - pictures) ** 2) / 0.08
            loss = error + sum(self.autoencoder.losses)
        reported = train(self, self.optimizer, tape, loss, self.autoencoder.trainable_variables)
        self.codes.update_state(sum(self.autoencoder.losses))
        return {**reported, "codes": self.codes.result()}


def vq_vae():
    model = VectorQuantized()
    model.compile(keras.optimizers.Adam(1e-3))
    return model


class Distiller(keras.Model):
    """A student learns from a teacher that stands still, by a loss that is Keras's and one that isn't."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = encoder(4), encoder(4)
        self.teacher.trainable = False
        self.total = keras.metrics.Mean("loss")

    def train_step(self, data):
        pictures, labels = data
        soft = ops.softmax(self.teacher(pictures, training=False) / 3)
        with tf.GradientTape() as tape:
            logits = self.student(pictures, training=True)
            hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
            loss = 0.3 * hard + 9 * keras.losses.KLDivergence()(soft, ops.softmax(logits / 3))
        return train(self, self.optimizer, tape, loss, self.student.trainable_variables)


def distiller():
    model = Distiller()
    model.compile(keras.optimizers.Adam(1e-3))
    return model


class Contrastive(keras.Model):
    """One loss for each example, as a vector: the tape adds them; `compute_average_loss` divides what is reported."""

    def __init__(self, batch):
        super().__init__()
        self.encoder, self.predictor = encoder(), keras.Sequential([keras.Input((6,)), layers.Dense(6)])
        self.total = keras.metrics.Mean("loss")
        self.batch = batch

    def train_step(self, data):
        first, second, _ = data[0]
        with tf.GradientTape() as tape:
            one, two = self.encoder(first), self.encoder(second)
            each = keras.losses.cosine_similarity(ops.stop_gradient(two), self.predictor(one))
            loss = each / self.batch
        variables = self.encoder.trainable_variables + self.predictor.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": tf.nn.compute_average_loss(each, global_batch_size=self.batch)}


def contrastive(batch):
    model = Contrastive(batch)
    model.compile(keras.optimizers.SGD(0.1))
    return model


class Translator(keras.Model):
    """A mean over the words that are there, which is no mean over examples."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(50, 8)
        self.recurrent = layers.GRU(8, return_sequences=True)
        self.out = layers.Dense(50)
        self.total = keras.metrics.Mean("loss")

    def train_step(self, data):
        words, _ = data
        mask = ops.cast(words[:, 1:] != 0, "float32")
        with tf.GradientTape() as tape:
            logits = self.out(self.recurrent(self.words(words[:, :-1])))
            each = keras.losses.sparse_categorical_crossentropy(words[:, 1:], logits, from_logits=True)
            loss = toolkit.strategies.batch_mean(each, mask)
        return train(self, self.optimizer, tape, loss, self.trainable_variables)


def translator():
    model = Translator()
    model.compile(keras.optimizers.Adam(1e-3))
    return model
