"""A tuner's loop: many models in one process, of which nothing is left when the next one is made."""

import processes
import pytest

LOOP = """
import gc
import sys
import keras
import numpy as np
import psutil
import toolkit

devices = toolkit.devices.configure(gpus=2, emulate="always")
strategy = toolkit.strategies.create("mirrored", devices=devices.logical_devices)
x, y = np.random.normal(size=(512, 16, 16, 3)).astype("float32"), np.random.randint(0, 10, 512)
for number in range(10):
    keras.backend.clear_session()
    with strategy.scope():
        layers = [keras.layers.Conv2D(16 + number, 3), keras.layers.BatchNormalization(), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((16, 16, 3)), *layers, keras.layers.Dense(64), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(10.0**-number), loss, metrics=["accuracy"])
    options = {"batch_size": 64, "epochs": 2, "validation_data": (x, y)}
    if sys.argv[1] == "run":
        with toolkit.training.Run(f"runs/{number}") as run:
            run.fit(model, x, y, **options)
    else:
        model.fit(x, y, verbose=0, **options)
    del model
    gc.collect()
    print("MEGABYTES", round(psutil.Process().memory_info().rss / 1e6))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", ["fit", "run"])
def test_memory_is_flat_over_ten_models(tmp_path, way):
    (tmp_path / "tune.py").write_text(LOOP)
    ended = processes.python(tmp_path, "tune.py", way, limit=400)
    seen = [int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("MEGABYTES")]
    assert len(seen) == 10, ended.stderr[-2000:]
    # Plain Keras keeps 13 MB of each of these models.
    assert max(seen[5:]) < seen[2] + 25, seen
