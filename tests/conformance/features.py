"""What Keras users do, each in a few lines as for one device, under one strategy; writes what it saw.

    python features.py STRATEGY REPLICAS OUT.json [FEATURE ...]

STRATEGY is one of `create`'s names, one of SERVED, "run": mirrored, with each `fit` in a `Run`, one of XLA, with
`jit_compile=True` in each `compile`, or "sharded": mirrored, with weights in shards, small ones too. A feature is a
function, whose name docs/features.csv has. It returns numbers that are to be one device's; an exception is written
down.
"""

import json
import os
import pathlib
import sys

import checked
import keras
import numpy as np
import tensorflow as tf
import whole_batch
from keras import layers, ops
from keras.src.trainers.trainer import Trainer

import toolkit
from toolkit.strategies.step import sharded_weights
from toolkit.support.graphs import outside

BATCH, EXAMPLES = 20, 103  # The last batch has 3.
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(EXAMPLES, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
WORDS = RANDOM.integers(1, 50, size=(EXAMPLES, 5))
WEIGHT = np.linspace(0.5, 1.5, EXAMPLES).astype("float32")
PLAIN = {"epochs": 2, "verbose": 0, "shuffle": False}
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FEATURES = {}
XLA = {"xla": "mirrored", "xla_workers": "multi_worker"}
SERVED = {"in_turn": {"max_staleness": 0}, "rounds": {"synchronous": True}, "free": {}}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def network(kind=keras.Model, *, dtype=None):
    given = keras.Input((6,), name="values")
    hidden = layers.Dense(8, activation="tanh", dtype=dtype)(given)
    return kind(given, layers.Dense(2, dtype="float32")(hidden))


def compiled(model=None, optimizer=None, **more):
    model = model or network()
    model.compile(optimizer or keras.optimizers.SGD(0.05), CROSSENTROPY, metrics=["accuracy"], **more)
    return model


def batches(*parts, batch=BATCH):
    return tf.data.Dataset.from_tensor_slices(parts or (X, Y)).batch(batch)


def seen(model, history=None, **more):
    """What a model has learnt, and said of it."""
    toolkit.strategies.wait_for_steps(model)
    found = {"weights": np.concatenate([np.ravel(each) for each in model.get_weights()])}
    if history is not None:
        found |= {f"history {name}": values for name, values in history.history.items()}
    return found | more


def trained(model=None, *data, **more):
    model = model or compiled()
    given = data or (X, Y)
    arrays = {"batch_size": BATCH} if isinstance(given[0], (np.ndarray, dict, tuple, list)) else {}
    return seen(model, model.fit(*given, **{**PLAIN, **arrays, **more}))


class Own(keras.Model):
    """A train_step as Keras's guide has it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, self(x))
        return {metric.name: metric.result() for metric in self.metrics}


@feature
def custom_train_step():
    return trained(compiled(network(Own)))


class Pair(keras.Model):
    """Two networks, two optimizers, and nothing to call."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(6)])
        self.second = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.total = keras.metrics.Mean("first_loss")

    def compile(self, one, two):
        super().compile()
        self.one, self.two = one, two

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.first(x) - x))
        grads = tape.gradient(loss, self.first.trainable_variables)
        self.one.apply_gradients(zip(grads, self.first.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            other = ops.mean(ops.square(self.second(self.first(x)) - 1))
        grads = tape.gradient(other, self.second.trainable_variables)
        self.two.apply_gradients(zip(grads, self.second.trainable_variables, strict=True))
        self.total.update_state(loss)
        return {"first_loss": self.total.result()}


@feature
def custom_train_step_without_call_and_two_optimizers():
    model = Pair()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05))
    return trained(model)


class Averaging(keras.Model):
    """As TensorFlow's guide to custom training with a strategy has it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": tf.reduce_mean(each)}


def without_metrics(model, *, rate=0.05):
    model.compile(keras.optimizers.SGD(rate))
    return model


@feature
def compute_average_loss():
    return trained(without_metrics(network(Averaging)))


class Vector(keras.Model):
    """One loss for each example, which the tape adds."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        self.optimizer.apply(tape.gradient(each, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(each)}


@feature
def a_loss_for_each_example():
    return trained(without_metrics(network(Vector), rate=0.005))


class Judged(keras.Model):
    """A test_step that reports a plain mean under the name that Keras gives its own."""

    def test_step(self, data):
        x, y = data
        return {"loss": ops.mean(ops.abs(self(x) - ops.cast(y[:, None], "float32")))}


@feature
def custom_test_step_with_plain_values():
    model = compiled(network(Judged))
    model.fit(X, Y, batch_size=BATCH, **PLAIN)
    return {"evaluated": [model.evaluate(X[:45], Y[:45], batch_size=15, verbose=0, return_dict=True)["loss"]]}


@feature
def class_weight():
    return trained(class_weight={0: 1.0, 1: 2.0})


@feature
def sample_weight():
    return trained(sample_weight=WEIGHT)


@feature
def dict_inputs():
    model = keras.Model({"values": (given := keras.Input((6,), name="values"))}, layers.Dense(2)(given))
    return trained(compiled(model), {"values": X}, Y)


@feature
def tuple_inputs():
    first, second = keras.Input((6,)), keras.Input((1,))
    model = keras.Model((first, second), layers.Dense(2)(layers.Concatenate()([first, second])))
    return trained(compiled(model), batches((X, WEIGHT[:, None]), Y))


@feature
def several_outputs():
    given = keras.Input((6,))
    hidden = layers.Dense(4, "tanh")(given)
    model = keras.Model(given, {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})
    model.compile("sgd", {"a": CROSSENTROPY, "b": "mse"}, loss_weights={"a": 1.0, "b": 0.3}, metrics={"a": "accuracy"})
    return trained(model, X, {"a": Y, "b": WEIGHT})


@feature
def ragged_inputs():
    words = tf.RaggedTensor.from_tensor(WORDS, lengths=1 + np.arange(EXAMPLES) % 5)
    model = compiled(keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)]))
    data = batches(words, Y).map(lambda x, y: (tf.cast(x.to_tensor(shape=(None, 5)), tf.float32) / 50, y))
    return trained(model, data)


@feature
def sparse_inputs():
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0))
    model = compiled(keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(2)]))
    return trained(model, batches(sparse, Y))


@feature
def sequences_of_words():
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(50, 4, mask_zero=True),
            layers.LSTM(4),
            layers.Dense(2),
        ]
    )
    return trained(compiled(model), WORDS * (np.arange(5) < 1 + np.arange(EXAMPLES)[:, None] % 5), Y)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return EXAMPLES // BATCH + 1

    def __getitem__(self, number):
        rows = slice(BATCH * number, BATCH * number + BATCH)
        return X[rows], Y[rows]


@feature
def pydataset():
    return trained(None, Batches())


@feature
def generator():
    def forever():
        while True:
            yield from (Batches()[number] for number in range(5))

    return trained(None, forever(), steps_per_epoch=5)


@feature
def torch_dataloader():
    import torch

    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return trained(None, torch.utils.data.DataLoader(data, batch_size=BATCH))


@feature
def numpy_arrays():
    return trained(validation_data=(X[:41], Y[:41]))


@feature
def numpy_shuffled():
    return trained(shuffle=True)


@feature
def validation_split():
    return trained(validation_split=0.3, validation_freq=2)


@feature
def tf_data_with_options():
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=4).cache().batch(BATCH).prefetch(2)
    return trained(None, data.with_options(options))


@feature
def tf_data_shuffled():
    return trained(None, tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(BATCH))


@feature
def endless_tf_data():
    return trained(None, batches().repeat(), steps_per_epoch=4)


@feature
def steps_per_execution():
    return trained(compiled(steps_per_execution=3))


@feature
def run_eagerly():
    return trained(compiled(run_eagerly=True))


@feature
def jit_compile():
    return trained(compiled(jit_compile=True))


@feature
def mixed_bfloat16():
    return trained(compiled(network(dtype="mixed_bfloat16")))


@feature
def mixed_float16():
    return trained(
        compiled(network(dtype="mixed_float16"), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)))
    )


@feature
def ema():
    return trained(compiled(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=4)))


@feature
def accumulation():
    return trained(compiled(optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)))


@feature
def clipping():
    return trained(compiled(optimizer=keras.optimizers.SGD(0.05, global_clipnorm=0.1)))


@feature
def learning_rate_schedule():
    return trained(compiled(optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, 12))))


@feature
def lora():
    model = compiled(network())
    model.layers[1].enable_lora(2)
    return trained(compiled(model))


@feature
def frozen_layers():
    model = network()
    model.layers[1].trainable = False
    return trained(compiled(model))


@feature
def batch_normalization():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])
    return trained(compiled(model))


@feature
def state_of_one_number():
    given = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(1)(given))
    return trained(compiled(keras.Model(given, layers.Dense(2)(hidden))))


class Seen(layers.Layer):
    """Keeps a moving mean of what it has seen."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(x, axis=0))
        return x


@feature
def a_layers_own_moving_mean():
    given = keras.Input((6,))
    model = compiled(keras.Model(given, layers.Dense(2)(Seen()(given))))
    return trained(model, X[:100], Y[:100], validation_data=(X[:41], Y[:41]))


@feature
def recompile():
    model = compiled()
    first = trained(model)
    model.layers[1].trainable = False
    model.compile(keras.optimizers.Adam(0.01), CROSSENTROPY, metrics=["accuracy"])
    return {"first": first["weights"], **trained(model)}


@feature
def fit_twice():
    model = compiled()
    first = trained(model)
    return {"first": first["weights"], **trained(model, epochs=4, initial_epoch=2)}


@feature
def several_models_in_a_loop():
    return {f"{width} {key}": value for width in (3, 5) for key, value in _narrow(width).items()}


def _narrow(width):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(width, "tanh"), layers.Dense(2)])
    return trained(compiled(model, keras.optimizers.Adam(0.01)))


class Sparse(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        return x


@feature
def add_loss():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Sparse(), layers.Dense(2)])
    return trained(compiled(model), validation_data=(X[:41], Y[:41]))


@feature
def regularizers():
    dense = layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer="l1")
    return trained(compiled(keras.Sequential([keras.Input((6,)), dense, layers.Dense(2)])))


@keras.saving.register_keras_serializable("features")
class Counts(keras.metrics.Metric):
    """Its result is a dict."""

    def __init__(self, name="counts", **more):
        super().__init__(name=name, **more)
        self.right = self.add_variable((), "zeros", name="right")
        self.all = self.add_variable((), "zeros", name="all")

    def update_state(self, y_true, y_pred, sample_weight=None):
        same = ops.equal(ops.cast(ops.ravel(y_true), "int32"), ops.cast(ops.argmax(y_pred, axis=-1), "int32"))
        self.right.assign_add(ops.sum(ops.cast(same, "float32")))
        self.all.assign_add(ops.cast(ops.size(same), "float32"))

    def result(self):
        return {"right": self.right + 0.0, "all": self.all + 0.0}


@feature
def metrics_with_state():
    model = network()
    auc = keras.metrics.MeanIoU(2, sparse_y_pred=False)
    model.compile("sgd", CROSSENTROPY, metrics=[keras.metrics.SparseTopKCategoricalAccuracy(1), auc])
    return trained(model, X, Y[:, None], validation_data=(X[:41], Y[:41, None]))


@feature
def metrics_that_are_vectors():
    given = keras.Input((6,))
    model = keras.Model(given, layers.Dense(2, "softmax")(given))
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    return trained(model, X, np.eye(2, dtype="float32")[Y])


@feature
def metrics_that_are_dicts():
    model = network()
    model.compile("sgd", CROSSENTROPY, metrics=[Counts()])
    return trained(model)


def with_callbacks(*callbacks, model=None, epochs=4, **more):
    return trained(model, epochs=epochs, validation_data=(X[:41], Y[:41]), callbacks=list(callbacks), **more)


@feature
def early_stopping_with_best_weights():
    model = compiled(optimizer=keras.optimizers.SGD(0.5))
    return with_callbacks(
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1, restore_best_weights=True), model=model
    )


@feature
def backup_and_restore():
    found = {}
    for epochs in (2, 4):  # As a script that is started again.
        keras.utils.set_random_seed(5)
        found = with_callbacks(keras.callbacks.BackupAndRestore(FOLDER / "backup"), model=compiled(), epochs=epochs)
    return found


@feature
def tensorboard():
    found = with_callbacks(keras.callbacks.TensorBoard(FOLDER / "board", histogram_freq=1, update_freq=2))
    return found | ({"written": [len(list((FOLDER / "board").rglob("events*"))) > 0]} if CHIEF else {})


@feature
def learning_rate_scheduler():
    return with_callbacks(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch))


@feature
def reduce_lr_on_plateau():
    return with_callbacks(keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1.0))


@feature
def swap_ema_weights():
    model = compiled(optimizer=keras.optimizers.SGD(0.05, use_ema=True))
    return with_callbacks(keras.callbacks.SwapEMAWeights(swap_on_epoch=True), model=model)


@feature
def model_checkpoint_by_batch():
    place = FOLDER / "newest.weights.h5"
    model = compiled()
    found = with_callbacks(keras.callbacks.ModelCheckpoint(place, save_weights_only=True, save_freq=4), model=model)
    # A model that only one worker makes isn't made in the scope.
    return found | ({"saved": outside(lambda: _loaded(place))} if CHIEF else {})


def _loaded(place):
    model = network()
    model.load_weights(place)
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


@feature
def csv_logger_and_terminate_on_nan():
    return with_callbacks(keras.callbacks.CSVLogger(FOLDER / "log.csv"), keras.callbacks.TerminateOnNaN())


@feature
def lambda_callback():
    losses = []
    each = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: losses.append(logs["loss"]))
    return with_callbacks(each) | {"losses": losses}


class StopAt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.stop_training = True


@feature
def stop_training_in_a_batch():
    model = compiled()
    return with_callbacks(StopAt(), model=model) | {"steps": [int(model.optimizer.iterations)]}


class Evaluates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found += self.model.evaluate(X[:41], Y[:41], batch_size=BATCH, verbose=0)
        self.found += self.model.predict(X[:7], verbose=0).ravel().tolist()


@feature
def evaluate_inside_fit():
    each = Evaluates()
    return with_callbacks(each) | {"evaluated": each.found}


@feature
def export():
    model = compiled()
    found = trained(model)
    model.export(FOLDER / "exported", verbose=False)
    exported = outside(lambda: tf.saved_model.load(FOLDER / "exported")) if CHIEF else None
    return found | ({"exported": outside(lambda: exported.serve(X))} if exported else {})


@feature
def save_and_load():
    model = compiled()
    found = trained(model)
    model.save(FOLDER / "whole.keras")
    again = keras.models.load_model(FOLDER / "whole.keras")
    return found | {"predicted": again.predict(X, verbose=0), "goes on": trained(again)["weights"]}


@feature
def save_by_the_chief_alone():
    model = compiled()
    found = trained(model)
    if CHIEF:
        model.save(FOLDER / "alone.keras")
    return found | ({"saved": [(FOLDER / "alone.keras").exists()]} if CHIEF else {})


@feature
def save_model_function():
    model = compiled()
    found = trained(model)
    keras.models.save_model(model, FOLDER / "function.keras")
    return found | {"predicted": keras.models.load_model(FOLDER / "function.keras").predict(X, verbose=0)}


@feature
def quantize():
    model = compiled()
    found = trained(model)
    model.quantize("int8")
    return found | {"predicted": np.round(model.predict(X, batch_size=BATCH, verbose=0), 1)}


@feature
def predict_on_uneven_data():
    return {
        "predicted": compiled().predict(X, batch_size=BATCH, verbose=0),
        "one": compiled().predict(X[:1], verbose=0),
    }


@feature
def predict_without_compile():
    return {"predicted": network().predict(batches(X), verbose=0)}


@feature
def predict_on_batch():
    return {"predicted": compiled().predict_on_batch(X[:BATCH])}


@feature
def train_on_batch():
    model = compiled()
    losses = [model.train_on_batch(X[:BATCH], Y[:BATCH])[0] for _ in range(3)]
    return seen(model) | {"losses": losses, "tested": model.test_on_batch(X[:BATCH], Y[:BATCH])}


# What was silently wrong on replicas once.


class Clipping(Own):
    """Holds its weights small after each update."""

    def train_step(self, data):
        logs = super().train_step(data)
        for variable in self.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -0.4, 0.4))
        return logs


class Copying(Own):
    """Copies its first kernel into another layer's at every third step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.target = layers.Dense(8, trainable=False)
        self.target.build((None, 6))
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        self.count.assign_add(1.0)
        target, kernel = self.target.kernel, self.layers[1].kernel
        tf.cond(tf.equal(self.count % 3, 0), lambda: target.assign(kernel), lambda: target.value)
        return logs


@feature
def assigning_and_applying_in_one_step():
    return trained(compiled(network(Clipping)))


@feature
def assigning_in_a_branch():
    return trained(compiled(network(Copying)))


@feature
def made_before_the_scope():
    def make():
        # Named: Keras counts layers in each thread, so both layers can become "dense".
        base = layers.Dense(8, activation="tanh", name="base")
        base.build((None, 6))
        return base, keras.optimizers.Adam(0.01)

    base, optimizer = outside(make)
    model = compiled(keras.Sequential([keras.Input((6,)), base, layers.Dense(2)]), optimizer)
    return trained(model, validation_split=0.2)


def fitted_with(loss, metric=None):
    model = network()
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=[metric] if metric else None)
    return trained(model)


@feature
def a_loss_that_is_a_sum():
    def summed(y, logits):
        return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)) / BATCH

    return fitted_with(summed)


def looking_at_the_batch(of):
    """A model whose own step, in training and validation, looks at the batch as a whole."""
    model = whole_batch.Own(of)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    data = batches(X, X[::-1])
    return seen(model, model.fit(data, validation_data=data, epochs=2, verbose=0, shuffle=False))


@feature
def in_batch_negatives_with_a_learnt_scale():
    return looking_at_the_batch(whole_batch.negatives)


@feature
def supervised_contrast():
    return looking_at_the_batch(whole_batch.supervised)


@feature
def a_correlation_matrix_of_the_batch():
    return looking_at_the_batch(whole_batch.barlow)


@feature
def variance_and_covariance_of_the_batch():
    return looking_at_the_batch(whole_batch.vicreg)


@feature
def hardest_negatives_of_the_batch():
    return looking_at_the_batch(whole_batch.hardest)


@feature
def mixup_with_the_reversed_batch():
    return looking_at_the_batch(whole_batch.mixup)


@feature
def a_masked_mean_by_hand():
    return looking_at_the_batch(whole_batch.masked)


@feature
def a_sum_divided_by_the_batch_size():
    return looking_at_the_batch(whole_batch.by_batch)


def with_a_layer(layer):
    given = keras.Input((6,))
    return trained(compiled(keras.Model(given, layers.Dense(2)(layer(layers.Dense(4, "tanh")(given))))))


@feature
def balance_of_experts():
    return with_a_layer(whole_batch.Router())


@feature
def a_layer_initialised_by_its_first_batch():
    return with_a_layer(whole_batch.ActNorm())


class TwoStreams(keras.Model):
    """Learns from labelled examples, and from more that have no labels."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        self.total = keras.metrics.Mean("total")

    def train_step(self, data):
        free, (x, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.body(x)[:, 0] - tf.cast(y, tf.float32)) ** 2)
            loss += 0.1 * tf.reduce_mean(self.body(free) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.total.update_state(loss)
        return {"total": self.total.result()}


@feature
def a_zip_of_two_batch_sizes():
    model = TwoStreams()
    model.compile(keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.zip(batches(X[:96], batch=32), batches(X[:24], Y[:24], batch=8))
    return seen(model, model.fit(data, epochs=2, verbose=0, shuffle=False))


@feature
def a_loss_that_is_not_separable():
    def overlap(y, logits):
        y, p = tf.cast(tf.reshape(y, (-1,)), tf.float32), tf.nn.softmax(logits)[:, 1]
        return 1 - (2 * tf.reduce_sum(y * p) + 1) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)

    return fitted_with(overlap)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.seen = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y, logits, sample_weight=None):
        self.seen.assign(tf.maximum(self.seen, tf.reduce_max(logits)))

    def result(self):
        return self.seen


@feature
def a_metric_that_is_not_a_sum():
    return fitted_with(CROSSENTROPY, Largest())


class InParts(keras.Model):
    """Each half of the network has an optimizer of its own."""

    def compile(self, **options):
        super().compile(**options)
        self.halves = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for optimizer, layer in zip(self.halves, (self.layers[1], self.layers[-1]), strict=True):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


@feature
def an_optimizer_of_a_sub_network():
    model = network(InParts)
    model.compile(loss=CROSSENTROPY)
    return trained(model)


@feature
def gradients_applied_in_no_step():
    model = compiled(optimizer=keras.optimizers.Adam(0.05))
    ones = [tf.ones(variable.shape) for variable in model.trainable_variables]
    model.optimizer.apply_gradients(zip(ones, model.trainable_variables, strict=True))
    return trained(model)


@feature
def a_dataset_distributed_by_the_user():
    data = tf.distribute.get_strategy().experimental_distribute_dataset(batches())
    return trained(compiled(), data, validation_data=data, class_weight={0: 1.0, 1: 3.0})


# What a step does with gradients before it applies them: see them as the whole batch's.


class Gradients(keras.Model):
    """Takes one loss and its gradients, and leaves to each kind what is done with them."""

    def of(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def put(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))

    def train_step(self, data):
        loss, gradients = self.of(data)
        return {"error": loss, **(self.use(gradients, loss, data) or {})}


class Clipped(Gradients):
    def use(self, gradients, loss, data):
        clipped, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.put(clipped)
        return {"norm": norm}


class Divided(Gradients):
    def use(self, gradients, loss, data):
        norm = tf.linalg.global_norm(gradients)
        self.put([each / norm * tf.stop_gradient(loss) for each in gradients])


class Sharpness(Gradients):
    """Goes up the slope, and takes the gradient there (SAM, arXiv 2010.01412)."""

    def use(self, gradients, loss, data):
        norm = tf.linalg.global_norm(gradients)
        ups = [0.1 * each / (norm + 1e-12) for each in gradients]
        for variable, up in zip(self.trainable_variables, ups, strict=True):
            variable.assign_add(up)
        _, there = self.of(data)
        for variable, up in zip(self.trainable_variables, ups, strict=True):
            variable.assign_sub(up)
        self.put(there)


class AddedByHand(Gradients):
    """Adds gradients up, and applies them at each second step, clipped."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        zeros = [tf.zeros(each.shape) for each in self.trainable_variables]
        self.sums = [keras.Variable(each, trainable=False) for each in zeros]
        self.count = keras.Variable(0, dtype="int32", trainable=False)

    def use(self, gradients, loss, data):
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)

        def apply():
            self.put(tf.clip_by_global_norm([tf.convert_to_tensor(each) / 2 for each in self.sums], 0.3)[0])
            for total in self.sums:
                total.assign(tf.zeros(total.shape))
            return 0

        tf.cond(tf.convert_to_tensor(self.count) % 2 == 0, apply, lambda: 0)


class Skipped(Gradients):
    def use(self, gradients, loss, data):
        def apply():
            self.put(gradients)
            return 0

        tf.cond(tf.linalg.global_norm(gradients) < 0.3, apply, lambda: 0)


class Projected(Gradients):
    """Takes from each of two tasks' gradients what goes against the other's (PCGrad, arXiv 2001.06782)."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            logits = self(x, training=True)
            first, second = self.compute_loss(y=y, y_pred=logits), tf.reduce_mean(tf.abs(logits))
        one, other = (tape.gradient(loss, self.trainable_variables) for loss in (first, second))
        dot = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(one, other, strict=True)])
        against, lengths = tf.minimum(dot, 0.0), [tf.linalg.global_norm(each) ** 2 for each in (one, other)]
        self.put([a + b - against * (b / lengths[1] + a / lengths[0]) for a, b in zip(one, other, strict=True)])
        return {"error": first}


class LearningToLearn(Gradients):
    """Differentiates the loss after a step, through that step (MAML, arXiv 1703.03400)."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def loss_of(weights):
            logits = tf.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]
            return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

        with tf.GradientTape() as outer:
            weights = [tf.convert_to_tensor(each) for each in variables]
            with tf.GradientTape() as inner:
                loss = loss_of([tf.convert_to_tensor(each) for each in variables])
            steps = inner.gradient(loss, variables)
            after = loss_of([weight - 0.5 * step for weight, step in zip(weights, steps, strict=True)])
        self.put(outer.gradient(after, variables))
        return {"error": after}


class ByExample(Gradients):
    """Clips each example's gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        rows = tape.jacobian(losses, self.trainable_variables)
        squares = [tf.reduce_sum(tf.reshape(each, [tf.shape(each)[0], -1]) ** 2, 1) for each in rows]
        factor = tf.minimum(1.0, 0.1 / tf.sqrt(tf.add_n(squares)))
        self.put([tf.einsum("i,i...->...", factor, each) / tf.cast(tf.shape(x)[0], tf.float32) for each in rows])
        return {"error": tf.reduce_mean(losses)}


class Noisy(Gradients):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = keras.random.SeedGenerator(5)

    def use(self, gradients, loss, data):
        clipped, _ = tf.clip_by_global_norm(gradients, 0.3)
        self.put([each + keras.random.normal(each.shape, stddev=0.01, seed=self.seed) for each in clipped])


class Centralised(keras.optimizers.SGD):
    """Takes a gradient's mean from it, in an optimizer of the user's own (arXiv 2004.01461)."""

    def apply(self, grads, trainable_variables=None):
        centred = [each - tf.reduce_mean(each, 0, keepdims=True) if each.shape.rank > 1 else each for each in grads]
        super().apply(tf.clip_by_global_norm(centred, 0.3)[0], trainable_variables)


def stepped(kind, **more):
    model = network(kind)
    model.compile(keras.optimizers.SGD(0.05), CROSSENTROPY, **more)
    return trained(model)


@feature
def gradients_clipped_by_their_norm():
    return stepped(Clipped)


@feature
def gradients_clipped_by_their_norm_eagerly():
    return stepped(Clipped, run_eagerly=True)


@feature
def gradients_divided_by_their_norm():
    return stepped(Divided)


@feature
def sharpness_aware_minimization():
    return stepped(Sharpness)


@feature
def accumulation_by_hand():
    return stepped(AddedByHand)


@feature
def steps_skipped_by_hand():
    return stepped(Skipped)


@feature
def projected_gradients_of_two_tapes():
    return stepped(Projected)


@feature
def gradients_of_second_order():
    return stepped(LearningToLearn)


@feature
def clipping_by_example():
    return stepped(ByExample)


@feature
def seeded_noise_on_gradients():
    return stepped(Noisy)


@feature
def an_optimizer_that_changes_gradients():
    return trained(compiled(optimizer=Centralised(0.1)))


def values(found):
    """What a feature saw, each as one list of numbers."""

    def numbers(value):
        leaves = [np.ravel(keras.ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(value)]
        return np.concatenate(leaves).astype(np.float64).tolist()

    return {key: numbers(value) for key, value in found.items()}


def main():
    kind, replicas, out, *names = sys.argv[1:]
    global FOLDER, CHIEF
    strategy = make(kind, int(replicas))
    CHIEF = toolkit.strategies.is_chief(strategy)
    found = {}
    for name in names or FEATURES:
        FOLDER = pathlib.Path(os.environ["FEATURES"], name)
        FOLDER.mkdir(parents=True, exist_ok=True)
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        try:
            with strategy.scope():
                found[name] = values(FEATURES[name]())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if CHIEF:
            pathlib.Path(out).write_text(json.dumps(found))


def fit_in_a_run(model, *data, **options):
    """`model.fit`, called by a `Run` in a directory of its own."""
    if "initial_epoch" in options or getattr(model, "_inside", False):
        return keras_fit(model, *data, **options)
    model._inside = True
    try:
        with toolkit.training.Run(FOLDER / f"run-{len(list(FOLDER.glob('run-*')))}", recipe="features") as run:
            return run.fit(model, *data, **options)
    finally:
        model._inside = False


def compile_with_xla(model, *args, **options):
    """`model.compile` with XLA, unless a feature says what it wants."""
    options = {"jit_compile": not options.get("run_eagerly", False)} | options
    return keras_compile(model, *args, **options)


def make(kind, replicas):
    if kind == "run":
        global keras_fit
        kind, keras_fit, keras.Model.fit = "mirrored", keras.Model.fit, fit_in_a_run
    if kind in XLA:
        global keras_compile
        strategy = make(XLA[kind], replicas)
        # Of the class that has it: Keras saves what a model was compiled with only if its `compile` is that one.
        keras_compile, Trainer.compile = Trainer.compile, compile_with_xla
        return strategy
    if kind in SERVED:
        options = toolkit.strategies.ParameterServerOptions(**SERVED[kind])
        return toolkit.strategies.create("auto", parameter_server=options, check=checked.CHECK)
    more = {"check": checked.CHECK}
    if kind == "sharded":
        sharded_weights.SMALLEST = 1
        kind, more = "mirrored", {"weights": "sharded", **more}
    devices = toolkit.devices.configure(gpus=1 if kind == "multi_worker" else replicas, emulate="always")
    return toolkit.strategies.create(kind, devices=devices.logical_devices, **more)


if __name__ == "__main__":
    main()
