"""Trains the four ways to divide a network under one strategy, with several optimizers, and writes what it saw.

    python combinations.py STRATEGY REPLICAS OUT.npz WAY ...

A WAY is such as replicated/sharded/adam: convolutions, FC layers, optimizer. After that may come a network of the
toolkit's, such as alexnet, which is trained for fewer steps and in float64: normalisation magnifies rounding.

Under multi_worker there are as many of these as replicas, each with its TF_CONFIG.
"""

import sys

import checked
import keras
import numpy as np
import train

import toolkit
from toolkit.parallel import Link, Machine, Setting, choose, costs, parallelize

STEPS, FEWER_STEPS = 20, 3
MACHINE = Machine(name="any", speed=1e12, inside=Link(bandwidth=1e9))


def main():
    name, replicas, out, *ways = sys.argv[1:]
    devices = toolkit.devices.configure(gpus=1 if name == "multi_worker" else int(replicas), emulate="always")
    strategy = toolkit.strategies.create(name, devices=devices.logical_devices, check=checked.CHECK)
    examples = toolkit.data.data_sets.load_shapes(train=600, test=203)
    batches = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=train.BATCH, seed=2)
    setting = Setting(replicas=strategy.num_replicas_in_sync, global_batch=32 * strategy.num_replicas_in_sync)
    seen = {}
    for way in ways:
        conv, fc, optimizer, *network = way.split("/")
        keras.config.set_floatx("float64" if network else "float32")
        keras.utils.set_random_seed(11)
        plain = toolkit.models.build(network[0]) if network else train.plain()
        plan = choose(costs(plain), MACHINE, setting, conv=conv, fc=fc)
        keras.utils.set_random_seed(11)
        with strategy.scope():
            model = parallelize(plain, plan)
            model.compile(
                train.OPTIMIZERS[optimizer](),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        losses = train.StepLosses()
        model.fit(
            batches.train(),
            steps_per_epoch=FEWER_STEPS if network else STEPS,
            callbacks=[losses],
            verbose=0,
            shuffle=False,
        )
        seen[f"{way}/losses"] = losses.losses
        if optimizer == "adamw":
            evaluated = model.evaluate(batches.test(), verbose=0, return_dict=True)
            seen[f"{way}/evaluated"] = [evaluated["loss"], evaluated["accuracy"]]
            seen[f"{way}/predicted"] = model.predict(examples.test_images, batch_size=30 * int(replicas), verbose=0)
    np.savez(out, **seen)


if __name__ == "__main__":
    main()
