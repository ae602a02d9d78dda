"""Trains one small model with several options at once, under one strategy, and writes what it saw.

    python crossings.py STRATEGY REPLICAS OUT.json CROSSING ...

A CROSSING names options, such as frozen+sharded: see OPTIONS. What ends in an exception is written down.
"""

import json
import pathlib
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import toolkit
from toolkit.strategies import GradientExchange, LocalSteps

OPTIONS = (
    "frozen",
    "sharded",
    "zero1",
    "accumulation",
    "powersgd",
    "local",
    "float16",
    "ema",
    "several_steps",
    "eager",
    "own_step",
    "two_optimizers",
    "recompute",
    "fit_twice",
    "resumed",
)
EPOCHS, BATCH = 4, 10
WIDTH = 64  # So wide that PowerSGD at rank 10, which is exact for ten examples, sends less.
RANDOM = np.random.default_rng(4)
X = RANDOM.normal(size=(40, 6)).astype("float32")
Y = np.tanh(X @ RANDOM.normal(size=(6, 1))).astype("float32")


class Own(keras.Model):
    """A train_step of the user's own, with one optimizer or, of its last layer, another one."""

    other = None

    def compile(self, *args, other=None, **kwargs):
        super().compile(*args, **kwargs)
        self.other = other

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
            scaled_otherwise = self.other.scale_loss(loss) if self.other else None
        last = self.layers[-1].trainable_variables if self.other else []
        first = [v for v in self.trainable_variables if not any(v is each for each in last)]
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, first), first, strict=True))
        if self.other:
            self.other.apply_gradients(zip(tape.gradient(scaled_otherwise, last), last, strict=True))
        return {"error": loss}


def optimizer(options, rate):
    """SGD where it must be: with others local steps have other numbers, and what PowerSGD rounds grows."""
    more = {"gradient_accumulation_steps": 2} if "accumulation" in options else {}
    more |= {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3} if "ema" in options else {}
    made = (
        keras.optimizers.SGD(rate, **more)
        if {"local", "powersgd"} & set(options)
        else keras.optimizers.AdamW(rate / 10, **more)
    )
    return keras.optimizers.LossScaleOptimizer(made, initial_scale=64.0) if "float16" in options else made


def network(options):
    with keras.RematScope("full" if "recompute" in options else None):
        given = keras.Input((6,))
        x = keras.layers.Dense(WIDTH, activation="tanh")(given)
        middle = (toolkit.parallel.ShardedDense if "sharded" in options else keras.layers.Dense)(WIDTH, name="middle")
        x = keras.layers.Dense(WIDTH, activation="tanh")(middle(x))
        out = keras.layers.Dense(1, dtype="float32")(x)
    middle.trainable = "frozen" not in options
    own = {"own_step", "two_optimizers"} & set(options)
    model = (Own if own else keras.Model)(given, out)
    more = {"other": optimizer(options, 0.05)} if "two_optimizers" in options else {}
    model.compile(
        optimizer(options, 0.1),
        "mse",
        run_eagerly="eager" in options,
        steps_per_execution=2 if "several_steps" in options else 1,
        **more,
    )
    return model


def strategy_for(kind, devices, options):
    if kind == "one_device":
        return toolkit.strategies.create(kind, devices=devices)
    return toolkit.strategies.create(
        kind,
        devices=devices,
        gradients=GradientExchange(compression="powersgd", rank=BATCH) if "powersgd" in options else None,
        local=LocalSteps(every=1) if "local" in options else None,
        optimizer_state="sharded" if "zero1" in options else "replicated",
    )


def trained(strategy, options):
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    parts = (2, 2) if "fit_twice" in options else (EPOCHS,)
    losses = []

    def model():
        keras.utils.set_random_seed(5)
        with strategy.scope():
            return network(options)

    def fit(call, made, epochs, **more):
        history = call(made, X, Y, epochs=epochs, **given, **more)
        losses.extend(next(iter(history.history.values()), []) if history else [])

    made = model()
    if "resumed" not in options:
        for epochs in parts:
            fit(lambda made, *a, **k: made.fit(*a, **k), made, epochs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for resumes in (False, True):
                losses.clear()
                made = model()
                with toolkit.training.Run(folder, resume=resumes, recipe="crossing") as run:
                    # What the first process did: the first of two calls, or half of the only one.
                    for epochs in parts if resumes else (EPOCHS // 2,):
                        fit(run.fit, made, epochs)
    weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in made.variables])
    return {"weights": weights.tolist(), "loss": [float(each) for each in losses[-2:]]}


def main():
    kind, replicas, out, *crossings = sys.argv[1:]
    devices = toolkit.devices.configure(gpus=1 if kind == "multi_worker" else int(replicas), emulate="always")
    found = {}
    for crossing in crossings:
        options = crossing.split("+")
        keras.utils.clear_session()
        keras.config.set_dtype_policy("mixed_float16" if "float16" in options else "float32")
        try:
            found[crossing] = trained(strategy_for(kind, devices.logical_devices, options), options)
        except Exception as error:
            found[crossing] = f"{type(error).__name__}: {error}"
        pathlib.Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
