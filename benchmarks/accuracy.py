"""Accuracy on real pictures of ways that train with other numbers than one device's, beside the synchronous run.

    python -m benchmarks.accuracy --data_dir=~/tensorflow_datasets [--replicas=2,4] [--seeds=3] [--epochs=10]

A small CNN (convolutions of 16, 32 and 64 filters, 66 thousand parameters), CIFAR-10, SGD with momentum 0.9 whose rate
falls by a cosine, batches of 128 together. Each run is its own process with as many devices on this machine, and
ends with the accuracy on the 10,000 test pictures; runs of one seed begin with the same weights and order. Figures are
medians and ranges over the seeds. About two minutes a run on two cores; `--out` keeps what was run.
"""

import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from absl import flags

import toolkit

WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "PowerSGD, rank 4": {"compression": "powersgd", "rank": 4},
    "PowerSGD, rank 4, after an epoch": {"compression": "powersgd", "rank": 4, "start_step": 1},
    "local, 16 steps": {"every": 16},
    "local, 16 steps, after an epoch": {"every": 16, "start_step": 1},
    "local, 16 steps, after five epochs": {"every": 16, "start_step": 5},
    "local, 16 steps, outer 1.0, 0.2": {"every": 16, "outer_momentum": 0.2},
    "local, 16 steps, outer 1.0, 0.2, after an epoch": {"every": 16, "outer_momentum": 0.2, "start_step": 1},
    "local, 16 steps, outer 1.0, 0.2, after five epochs": {"every": 16, "outer_momentum": 0.2, "start_step": 5},
    "local, 16 steps, outer 1.0, 0.4": {"every": 16, "outer_momentum": 0.4},
    "local, 16 steps, outer 0.7, 0.9": {"every": 16, "outer_rate": 0.7, "outer_momentum": 0.9},
}
_WAYS = flags.DEFINE_multi_enum("way", list(WAYS), list(WAYS), "What is run; again for several.")
_REPLICAS = flags.DEFINE_list("replicas", ["2", "4"], "How many.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs.", lower_bound=1)
_EXAMPLES = flags.DEFINE_integer("examples", 50_000, "Of the training pictures.", lower_bound=128, upper_bound=50_000)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where CIFAR-10 was prepared; None for TFDS's own folder.")
_OUT = flags.DEFINE_string("out", "build/accuracy.json", "What was run, and is not run again.")
_ONE = flags.DEFINE_integer("seed", None, "Of a run that this benchmark starts itself.")


def main() -> None:
    """Runs what `--out` hasn't got, and prints the table."""
    if _ONE.value is not None:
        print(json.dumps(accuracy(_WAYS.value[0], int(_REPLICAS.value[0]), _ONE.value)))
        return
    out = pathlib.Path(_OUT.value)
    seen = json.loads(out.read_text()) if out.exists() else {}
    for seed in range(_SEEDS.value):
        for replicas in _REPLICAS.value:
            for way in _WAYS.value:
                run = f"{replicas} replicas, {way}, seed {seed}, {_EPOCHS.value} epochs of {_EXAMPLES.value}"
                if run not in seen:
                    own = ["--way", way, f"--replicas={replicas}", f"--seed={seed}", f"--epochs={_EPOCHS.value}"]
                    own += [f"--examples={_EXAMPLES.value}"]
                    own += [f"--data_dir={_DATA_DIR.value}"] if _DATA_DIR.value else []
                    command = [sys.executable, "-m", "benchmarks.accuracy", *own]
                    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
                    seen[run] = json.loads(ended.stdout.splitlines()[-1])
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_text(json.dumps(seen, indent=1))
                print(f"{run}: {seen[run]:.2f} %", file=sys.stderr, flush=True)
    print(table(seen))


def accuracy(way: str, replicas: int, seed: int) -> float:
    """Trains once, and returns the percentage of test pictures that are told right."""
    devices = toolkit.devices.configure(gpus=replicas, emulate="always")
    given = dict(WAYS[way])
    if "start_step" in given:  # Of epochs.
        given["start_step"] *= _EXAMPLES.value // 128
    options = {
        "local": toolkit.strategies.LocalSteps(**given) if "every" in given else None,
        "gradients": toolkit.strategies.GradientExchange(**given) if "rank" in given else None,
    }
    asked = {name: option for name, option in options.items() if option is not None}
    strategy = toolkit.strategies.create("mirrored", devices=devices.logical_devices, **asked)

    import keras

    data = toolkit.data.load("cifar10", data_dir=_DATA_DIR.value)
    x, y = data.train_images[: _EXAMPLES.value], data.train_labels[: _EXAMPLES.value]
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        parts: list = [keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 64, offset=-1.9)]
        for filters in (16, 32, 64):
            parts += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
        parts += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential(parts)
        rate = keras.optimizers.schedules.CosineDecay(0.05, _EPOCHS.value * (len(x) // 128))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=128, epochs=_EPOCHS.value, verbose=0)
    return 100 * model.evaluate(data.test_images, data.test_labels, batch_size=1000, verbose=0)[1]


def table(seen: dict[str, float]) -> str:
    """Returns medians, ranges, and what they are beside the synchronous runs, as Markdown."""
    rows = ["| replicas | way | accuracy | from synchronous |", "| --- | --- | --- | --- |"]
    for replicas in _REPLICAS.value:
        middle = {}
        for way in _WAYS.value:
            end = f"{_EPOCHS.value} epochs of {_EXAMPLES.value}"
            runs = [seen[f"{replicas} replicas, {way}, seed {seed}, {end}"] for seed in range(_SEEDS.value)]
            middle[way] = statistics.median(runs)
            less = f"{middle[way] - middle['synchronous']:+.2f}" if "synchronous" in middle else "-"
            rows.append(f"| {replicas} | {way} | {middle[way]:.2f} ({min(runs):.2f} to {max(runs):.2f}) | {less} |")
    return "\n".join(rows)


if __name__ == "__main__":
    toolkit.cli.run(main)
