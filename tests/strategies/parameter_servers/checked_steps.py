"""Fits, evaluates and predicts beside parameter servers with the first steps compared; says what came of it.

checked_steps.py OUT.json
"""

import json
import logging
import pathlib
import sys

import keras
import numpy as np
import one_process
import tensorflow as tf

import toolkit
from toolkit.errors import StrategyError
from toolkit.strategies import options
from toolkit.strategies.check import first_step, watching
from toolkit.strategies.parameter_servers.worker_step import current

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(33, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 33)
WORDS = RANDOM.integers(0, 9, (33, 4))


class Faulty(keras.optimizers.Adam):
    """Its slots are wrong where workers or the chief apply what was sent."""

    def update_step(self, gradient, variable, rate):
        super().update_step(gradient, variable, rate)
        if current() is not None and tuple(variable.shape) == (5, 3):
            self._momentums[self._get_variable_index(variable)].assign_add(0.01 * gradient)


class Own(keras.Model):
    """A step of one's own, whose second optimizer is built by its first step, and whose logs are its own."""

    def __init__(self):
        super().__init__()
        self.dense, self.other = keras.layers.Dense(3), keras.optimizers.SGD(0.1)
        self.seen = keras.metrics.Mean("seen")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
        self.other.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.update_state(loss)
        return {"mean": self.seen.result(), "twice": 2.0 * loss}


def plain(optimizer="adam"):
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    return compiled(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)]), optimizer)


def divided():
    """Of layers with which a round is divided; its last one is of the shape that `Faulty` looks for."""
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((6,)), *layers]))


def faulty():
    return compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(3)]), Faulty())


def own():
    model = Own()
    model.build((None, 6))
    model.compile()
    return model


def words():
    layers = [keras.layers.Embedding(9, 5), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((4,), dtype="int32"), *layers]))


def compiled(model, optimizer="adam", **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    return model


MODELS = {"plain": plain, "divided": divided, "faulty": faulty, "own": own, "words": words}


def fitted(strategy, make, check):
    """Returns what was said of each first step, or an error's words; the weights and losses of the training."""
    options.set_options(strategy, options.Options(check=check))
    keras.utils.set_random_seed(1)
    said, logged = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("toolkit.strategies.parameter_servers").addHandler(handler)
    conclude = first_step.conclude
    first_step.conclude = lambda step: (said.append(step), conclude(step))
    try:
        with strategy.scope():
            model = make()
        x = WORDS if make is words else X
        losses = []
        for _ in range(2):
            losses += model.fit(x, Y, batch_size=8, epochs=2, verbose=0).history.get("loss", [])
        if make is not own:
            model.evaluate(x, Y, batch_size=8, verbose=0)
        model.predict(x[:9], batch_size=5, verbose=0)
        toolkit.strategies.wait_for_steps(model)
        weights = [np.asarray(v).ravel().tolist() for v in (*model.weights, *model.optimizer.variables)]
    except StrategyError as error:
        return {"steps": [vars(each) for each in said], "error": str(error)}
    finally:
        first_step.conclude = conclude
        logging.getLogger("toolkit.strategies.parameter_servers").removeHandler(handler)
    return {"steps": [vars(each) for each in said], "weights": weights, "losses": losses, "logged": logged}


def watched(strategy):
    with watching.watched() as session, strategy.scope():
        model = plain()
        history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, validation_data=(X, Y))
        model.predict(X, verbose=0)
        steps = [vars(each) for each in session.steps]
    return {"steps": steps, "epochs": len(history.epoch), "count": int(model.optimizer.iterations)}


def main():
    strategy = one_process.served("rounds", ps=2)
    found = {}
    for mode in ("rounds", "in_turn"):
        one_process.as_if(strategy, mode)
        for name, make in MODELS.items():
            found[f"{mode}, {name}"] = fitted(strategy, make, "first_step")
        found[f"{mode}, unchecked"] = fitted(strategy, divided, "none")
    one_process.as_if(strategy, "rounds")
    found["rounds, words unchecked"] = fitted(strategy, words, "none")
    strategy.options = toolkit.strategies.ParameterServerOptions(
        synchronous=True, variables="sharded", min_shard_bytes=32
    )
    strategy._placement.options = strategy.options
    found["rounds, sharded"] = fitted(strategy, divided, "first_step")
    found["watched"] = watched(strategy)
    one_process.as_if(strategy, "free")
    found["free, plain"] = fitted(strategy, plain, "first_step")
    strategy.options = toolkit.strategies.ParameterServerOptions(max_staleness=0, min_lazy_bytes=1)
    found["lazy"] = fitted(strategy, words, "first_step")
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
