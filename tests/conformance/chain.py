"""Goes on with a run of a model with sharded layers for one more epoch, on other replicas than before.

    python chain.py MODEL REPLICAS[/SHARDS] EPOCHS RUN_DIR OUT.npz

MODEL is one of `train.MODELS`. REPLICAS are devices of this process, of each of them where it is one of several.
"""

import csv
import os
import pathlib
import sys

import keras
import numpy as np
import train

import toolkit

STEPS = 6


def main():
    model, replicas, epochs, directory, out = sys.argv[1:]
    replicas, _, shards = replicas.partition("/")
    member = toolkit.cluster.discover(os.environ)
    chief = member is None or member.task == member.cluster.chief
    resume = pathlib.Path(directory).exists()
    with toolkit.training.Run(directory, recipe="chain", resume=resume, chief=chief, checkpoint_steps=4) as run:
        run.record_config(optimizer="adamw")
        mesh = {"shards": int(shards)} if shards else {}
        devices = toolkit.devices.configure(gpus=int(replicas), emulate="always")
        strategy = toolkit.strategies.create("auto", devices=devices.logical_devices, membership=member, **mesh)
        examples = toolkit.data.data_sets.load_shapes(train=600, test=203)
        batches = toolkit.data.Batches(
            examples=examples, strategy=strategy, global_batch_size=train.BATCH, seed=2, steps_per_epoch=STEPS
        )
        model = train.compiled(strategy, model, "adamw")
        run.fit(model, batches, epochs=int(epochs))
        if chief:
            weights = keras.models.load_model(run.path / "model.keras").get_weights()
            with open(run.path / "history.csv") as file:
                np.savez(out, *weights, losses=[float(row["loss"]) for row in csv.DictReader(file)])


if __name__ == "__main__":
    main()
