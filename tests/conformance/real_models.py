"""Models that everybody trains, in scripts that know nothing of strategies, trained under one; writes what it saw.

    python real_models.py STRATEGY REPLICAS OUT.npz [MODEL ...]

STRATEGY is one of `create`'s names, or one of `train.SERVED`. They draw as their authors have them draw: dropout,
augmentation, the noise of a VAE, of GANs and of a diffusion model.
"""

import contextlib
import os
import pathlib
import sys
import tempfile

import checked
import keras
import numpy as np
import own_steps
import tensorflow as tf
import train
from keras import layers, ops

import toolkit
from toolkit.strategies.processes import agreement
from toolkit.strategies.variables import optimizers_of

STEPS = 20
BATCH = 30  # 4 replicas have 7 or 8 of them.
EXAMPLES = 203  # The last batch of an epoch has 23.
rng = np.random.default_rng(0)
IMAGES = rng.uniform(size=(EXAMPLES, 16, 16, 3)).astype("float32")
LABELS = rng.integers(0, 4, size=EXAMPLES)
TOKENS = rng.integers(1, 50, size=(EXAMPLES, 12)) * (np.arange(12) < rng.integers(3, 13, size=(EXAMPLES, 1)))
SERIES = rng.normal(size=(EXAMPLES, 20, 3)).astype("float32")


def classifier(inputs, outputs, optimizer, **more):
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **more)
    return model


def cnn():
    keras.config.set_dtype_policy("float64")  # In float32 a last digit may decide which pixel is the largest.
    inputs = keras.Input((16, 16, 3))
    x = layers.RandomRotation(0.1)(layers.RandomFlip("horizontal")(inputs))
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.SpatialDropout2D(0.1)(layers.MaxPooling2D()(layers.ReLU()(x)))
    outputs = layers.Dense(4)(layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x)))
    model = classifier(inputs, outputs, keras.optimizers.SGD(0.02, momentum=0.9))
    keras.config.set_dtype_policy("float32")
    return model


def plain_cnn(optimizer, dtype="float32"):
    keras.config.set_dtype_policy(dtype)
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (8, 16):
        x = layers.MaxPooling2D()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
    outputs = layers.Dense(4, dtype="float32")(layers.Flatten()(x))
    model = classifier(inputs, outputs, optimizer)
    keras.config.set_dtype_policy("float32")
    return model


class TokensAndPositions(layers.Layer):
    def __init__(self, length, words, width):
        super().__init__()
        self.words = layers.Embedding(words, width, mask_zero=True)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return self.words.compute_mask(x)


def block(x, width):
    attended = layers.MultiHeadAttention(2, width // 2, dropout=0.1)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
    inner = layers.Dropout(0.1)(layers.Dense(width)(layers.Dense(2 * width, activation="relu")(x)))
    return layers.LayerNormalization()(x + inner)


class Patches(layers.Layer):
    def __init__(self, size, count, width):
        super().__init__()
        self.size, self.count = size, count
        self.project, self.positions = layers.Dense(width), layers.Embedding(count, width)

    def call(self, images):
        patches = ops.image.extract_patches(images, self.size)
        patches = ops.reshape(patches, (ops.shape(images)[0], self.count, patches.shape[-1]))
        return self.project(patches) + self.positions(ops.arange(0, self.count))


def vision_transformer():
    inputs = keras.Input((16, 16, 3))
    x = Patches(4, 16, 16)(layers.RandomTranslation(0.1, 0.1)(inputs))
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(block(block(x, 16), 16)))
    return classifier(inputs, layers.Dense(4)(x), keras.optimizers.SGD(0.05, momentum=0.9))


def text_transformer():
    inputs = keras.Input((12,), dtype="int32")
    x = block(TokensAndPositions(12, 50, 16)(inputs), 16)
    return classifier(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)), keras.optimizers.Adam(1e-3))


def tagger():
    """A class for each word: the loss is masked."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True, dropout=0.2)(layers.Embedding(50, 8, mask_zero=True)(inputs))
    return classifier(inputs, layers.Dense(4)(x), keras.optimizers.Adam(1e-2))


def series_transformer():
    inputs = keras.Input((20, 3))
    x = block(layers.Conv1D(8, 3, padding="same", activation="relu")(inputs), 8)
    return classifier(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)), keras.optimizers.AdamW(1e-3))


def lstm_on_dicts():
    inputs = {"text": keras.Input((12,), dtype="int32", name="text"), "series": keras.Input((20, 3), name="series")}
    text = layers.Bidirectional(layers.LSTM(6))(layers.Embedding(50, 8, mask_zero=True)(inputs["text"]))
    both = layers.Concatenate()([text, layers.GRU(6)(inputs["series"])])
    return classifier(inputs, layers.Dense(4)(both), keras.optimizers.RMSprop(1e-3))


def autoencoder():
    inputs = keras.Input((16, 16, 3))
    x = layers.MaxPooling2D()(layers.Conv2D(8, 3, activation="relu", padding="same")(inputs))
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="sigmoid", padding="same")(x))
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy")
    return model


class Vae(keras.Model):
    """As a guide has it: its loss is made of means over the batch that it sees."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((16, 16, 3)), layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(16)]
        )
        self.decoder = keras.Sequential([keras.Input((8,)), layers.Dense(768, "sigmoid"), layers.Reshape((16, 16, 3))])
        self.seed = keras.random.SeedGenerator(3)
        self.totals = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self):
        return self.totals

    def train_step(self, data):
        images = data[0]
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(images), 2, axis=1)
            noise = keras.random.normal(ops.shape(mean), seed=self.seed)
            pictures = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(images, pictures), axis=(1, 2)))
            kl = ops.mean(ops.sum(-0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance)), axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for metric, value in zip(self.totals, (total, reconstruction, kl), strict=True):
            metric.update_state(value, sample_weight=ops.shape(images)[0])
        return {metric.name: metric.result() for metric in self.totals}

    def call(self, images):
        return self.decoder(ops.split(self.encoder(images), 2, axis=1)[0])


def vae():
    model = Vae()
    model.compile(keras.optimizers.SGD(1e-3))
    return model


class Gan(keras.Model):
    """Two optimizers, and losses of Keras's."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((16, 16, 3)), layers.Conv2D(8, 3, strides=2), layers.LeakyReLU(0.2), layers.Flatten(),
             layers.Dense(1)]
        )  # fmt: skip
        self.generator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8 * 8 * 4), layers.LeakyReLU(0.2), layers.Reshape((8, 8, 4)),
             layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="sigmoid")]
        )  # fmt: skip
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn=None):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def train_step(self, data):
        real = data[0]
        rows = ops.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, 8)))
        labels = ops.concatenate([ops.zeros((rows, 1)), ops.ones((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(ops.concatenate([real, fake], axis=0)))
        self.step(self.d_optimizer, tape, d_loss, self.discriminator)
        with tf.GradientTape() as tape:
            noise = keras.random.normal((rows, 8))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        self.step(self.g_optimizer, tape, g_loss, self.generator)
        return self.report(d_loss, g_loss, rows)

    def step(self, optimizer, tape, loss, network):
        gradients = tape.gradient(loss, network.trainable_weights)
        optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))

    def report(self, d_loss, g_loss, rows):
        self.d_metric.update_state(d_loss, sample_weight=rows)
        self.g_metric.update_state(g_loss, sample_weight=rows)
        return {"d_loss": self.d_metric.result(), "loss": self.g_metric.result()}

    def call(self, images):
        noise = ops.mean(images, axis=(1, 2)) @ ops.ones((3, 8))
        return self.discriminator(images) + 0 * self.discriminator(self.generator(noise))


def dcgan():
    model = Gan()
    model.compile(
        keras.optimizers.Adam(1e-4), keras.optimizers.Adam(2e-4), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return model


class WassersteinGan(Gan):
    def train_step(self, data):
        real = data[0]
        rows = ops.shape(real)[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(keras.random.normal((rows, 8)))
                cost = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real))
                between = real + keras.random.uniform((rows, 1, 1, 1)) * (fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    judged = self.discriminator(between)
                slopes = ops.sqrt(ops.sum(ops.square(inner.gradient(judged, between)), axis=(1, 2, 3)) + 1e-12)
                d_loss = cost + 10.0 * ops.mean(ops.square(slopes - 1.0))
            self.step(self.d_optimizer, tape, d_loss, self.discriminator)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(keras.random.normal((rows, 8)))))
        self.step(self.g_optimizer, tape, g_loss, self.generator)
        return self.report(d_loss, g_loss, rows)


def wgan_gp():
    model = WassersteinGan()
    model.compile(keras.optimizers.Adam(1e-4, beta_1=0.5), keras.optimizers.SGD(1e-3))
    return model


class Diffusion(keras.Model):
    """Denoises by a network, and keeps another whose weights are averages; draws times and noise for each picture."""

    def __init__(self):
        super().__init__()
        noisy, variance = keras.Input((16, 16, 3)), keras.Input((1, 1, 1))
        x = layers.Concatenate()([layers.Conv2D(8, 1)(noisy), layers.UpSampling2D(16)(variance)])
        x = layers.Conv2D(8, 3, padding="same", activation="swish")(layers.BatchNormalization(scale=False)(x))
        self.network = keras.Model([noisy, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))
        self.averages = keras.models.clone_model(self.network)
        self.totals = [keras.metrics.Mean(name=name) for name in ("loss", "image_loss")]

    @property
    def metrics(self):
        return self.totals

    def train_step(self, data):
        images = 2.0 * data[0] - 1.0
        rows = ops.shape(images)[0]
        noise, times = keras.random.normal(ops.shape(images)), keras.random.uniform((rows, 1, 1, 1))
        signal, rate = ops.cos(0.3 + times), ops.sin(0.3 + times)
        with tf.GradientTape() as tape:
            found = self.network([signal * images + rate * noise, rate**2], training=True)
            loss = self.loss(noise, found)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        image_loss = self.loss(images, (signal * images + rate * (noise - found)) / signal)
        for metric, value in zip(self.totals, (loss, image_loss), strict=True):
            metric.update_state(value, sample_weight=rows)
        for average, weight in zip(self.averages.weights, self.network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {metric.name: metric.result() for metric in self.totals}

    def call(self, images):
        return self.averages([images, ops.mean(images, axis=(1, 2, 3), keepdims=True)])


def diffusion():
    model = Diffusion()
    # Adam divides by the size of gradients, of which some are zero but for rounding: those before a normalisation.
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.MeanAbsoluteError())
    return model


def recommender():
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
    user, item = (layers.Embedding(50, 8)(inputs[name]) for name in ("user", "item"))
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([user * item, user, item])))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def unet():
    inputs = keras.Input((16, 16, 3))
    first = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D()(first))
    x = layers.Concatenate()([layers.UpSampling2D()(x), first])
    return classifier(inputs, layers.Conv2D(4, 1)(x), keras.optimizers.Adam(1e-3))


def accumulating():
    return plain_cnn(
        keras.optimizers.AdamW(
            1e-3, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=4
        )
    )


def overflowing():
    """The gradients of the third batch's last examples, which one replica has, overflow in 16 bits."""
    images = IMAGES.copy()
    images[85:88] *= 1000
    return images


PIXELS = (IMAGES.mean(axis=-1) * 4).astype(int)
TAGS = TOKENS % 4
RATINGS = (np.sin(TOKENS[:, :1]) + np.cos(TOKENS[:, 1:2])).astype("float32")
MODELS = {
    "cnn, augmented and normalised": (cnn, (IMAGES, LABELS)),
    "text transformer, masked": (text_transformer, (TOKENS, LABELS)),
    "tagger, masked loss": (tagger, (TOKENS, TAGS)),
    "time series transformer": (series_transformer, (SERIES, LABELS)),
    "LSTM on dicts": (lstm_on_dicts, ({"text": TOKENS, "series": SERIES}, LABELS)),
    "autoencoder": (autoencoder, (IMAGES, IMAGES)),
    "vision transformer": (vision_transformer, (IMAGES, LABELS)),
    "VAE with its own train_step": (vae, (IMAGES,)),
    "DCGAN": (dcgan, (IMAGES,)),
    "WGAN-GP": (wgan_gp, (IMAGES,)),
    "diffusion": (diffusion, (IMAGES,)),
    "recommender": (recommender, ({"user": TOKENS[:, 0], "item": TOKENS[:, 1]}, RATINGS)),
    "U-Net": (unet, (IMAGES, PIXELS)),
    "mixed_float16, an overflow": (
        lambda: plain_cnn(keras.optimizers.Adam(1e-3), "mixed_float16"), (overflowing(), LABELS)
    ),
    "mixed_bfloat16": (lambda: plain_cnn(keras.optimizers.Adam(1e-3), "mixed_bfloat16"), (IMAGES, LABELS)),
    "accumulating, clipped, averaged": (accumulating, (IMAGES, LABELS)),
    "siamese network": (own_steps.siamese, ((IMAGES, IMAGES[::-1], IMAGES**2),)),
    "VQ-VAE": (own_steps.vq_vae, (IMAGES,)),
    "distiller": (own_steps.distiller, (IMAGES, LABELS)),
    "contrastive, a vector of losses": (
        lambda: own_steps.contrastive(BATCH), ((IMAGES, IMAGES[::-1], IMAGES**2),)
    ),
    "translator, a masked mean": (own_steps.translator, (TOKENS, LABELS)),
}  # fmt: skip


AUGMENTING = ("cnn, augmented and normalised", "vision transformer")  # Keras exports such layers as in training.


class StepLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


class StopAfter(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.steps:
            raise toolkit.errors.StoppedBySignal(15, step=None)


def begun(strategy, build, data):
    """A new model, and the data that it is trained on."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = build()
    return model, tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else (data[0],)).batch(BATCH).repeat()


def trained(strategy, name, folder):
    """A model's losses by step, its weights, and how far what it leaves, and a resumed one, are from itself."""
    build, data = MODELS[name]
    model, dataset = begun(strategy, build, data)
    losses = StepLosses()
    model.fit(dataset, steps_per_epoch=STEPS, epochs=1, callbacks=[losses], verbose=0)
    toolkit.strategies.wait_for_steps(model)
    seen = {"losses": np.array(losses.losses), "weights": flat(model)}
    seen["steps"] = [int(keras.ops.convert_to_numpy(each.iterations)) for each in optimizers_of(model)]
    callable_on_it = isinstance(model, keras.Sequential) or type(model).call is not keras.Model.call
    # It takes as long as the training; beside parameter servers it isn't tried.
    if strategy.num_replicas_in_sync == 2 and callable_on_it:
        seen["saved"], seen["exported"] = left(strategy, model, build, data[0])
        if name in AUGMENTING:
            del seen["exported"]
    if strategy.num_replicas_in_sync == 2 and agreement.processes(strategy) == 2:  # As long again, and once will do.
        other = resumed(strategy, build, data, folder / f"run-{list(MODELS).index(name)}")
        seen["resumed"] = np.abs(flat(other) - seen["weights"]).max()
    return seen


def resumed(strategy, build, data, folder):
    """A model whose run is stopped in mid-epoch, between two checkpoints, and goes on in another model."""
    model, dataset = begun(strategy, build, data)
    with contextlib.suppress(toolkit.errors.StoppedBySignal), toolkit.training.Run(folder, checkpoint_steps=7) as run:
        run.fit(model, dataset, steps_per_epoch=STEPS, epochs=1, callbacks=[StopAfter(11)], verbose=0)
    model, dataset = begun(strategy, build, data)
    with toolkit.training.Run(folder, checkpoint_steps=7, resume=True) as run:
        run.fit(model, dataset, steps_per_epoch=STEPS, epochs=1, verbose=0)
    return model


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def left(strategy, model, build, inputs):
    """How far the answers of what a model leaves on disk are from its own: its weights in another model, an export."""
    few = tf.nest.map_structure(lambda leaf: leaf[:60], inputs)
    asked = tf.data.Dataset.from_tensor_slices((few,)).batch(60)
    expected = model.predict(asked, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(pathlib.Path(folder, "it.weights.h5"))
        model.export(pathlib.Path(folder, "exported"), verbose=False)
        other = build()
        other.predict(asked, verbose=0)
        other.load_weights(pathlib.Path(folder, "it.weights.h5"))
        exported = (
            tf.saved_model.load(pathlib.Path(folder, "exported")) if toolkit.strategies.is_chief(strategy) else None
        )
        answers = expected if exported is None else exported.serve(few)  # Other workers' is elsewhere.
    return [np.abs(np.asarray(answer) - expected).max() for answer in (other.predict(asked, verbose=0), answers)]


def main():
    kind, replicas, out, *names = sys.argv[1:]
    if kind in train.SERVED:
        options = toolkit.strategies.ParameterServerOptions(**train.SERVED[kind])
        strategy = toolkit.strategies.create("auto", parameter_server=options, check=checked.CHECK)
    else:
        devices = toolkit.devices.configure(gpus=1 if kind == "multi_worker" else int(replicas), emulate="always")
        strategy = toolkit.strategies.create(kind, devices=devices.logical_devices, check=checked.CHECK)
    seen = {}
    for name in names or MODELS:
        found = trained(strategy, name, pathlib.Path(out).parent)
        seen |= {f"{name}/{key}": value for key, value in found.items()}
    own = pathlib.Path(out).with_suffix(f".{os.getpid()}.npz")  # Workers may be given the same name.
    np.savez(own, **seen)
    own.replace(out)


if __name__ == "__main__":
    main()
