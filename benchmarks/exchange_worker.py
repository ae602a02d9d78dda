"""One of two processes that benchmarks.two_hosts starts: trains a while, and writes what it measured.

    python -m benchmarks.exchange_worker --row=hybrid --rank=0 --addresses=A:P,B:P --out=FILE.json

The network: pictures [64, 32, 32, 3] in each process, convolutions of 32 and 64 filters (3x3, each pooled), FC layers
of 4096, 2048, 2048 and 10: 12.6 M parameters, 99 % of them FC. SGD with momentum. Bytes are what the kernel received on
the process's own interface while the steps ran.
"""

import json
import os
import pathlib
import statistics
import time

from absl import flags

from benchmarks.namespaces import received

ROWS = (
    "ddp float32",
    "ddp float16",
    "tensorflow float32",
    "data float32",
    "data float16",
    "hybrid float32",
    "hybrid 16 bits",
)
_ROW = flags.DEFINE_enum("row", "data float32", list(ROWS), "What is measured.")
_RANK = flags.DEFINE_integer("rank", 0, "Which of the two this is.")
_ADDRESSES = flags.DEFINE_list("addresses", [], "Of both.")
_OUT = flags.DEFINE_string("out", None, "Where the measurements go.")
STEPS = flags.DEFINE_integer("steps", 30, "Steps measured.", lower_bound=5)
_WARM = 8
_BATCH = 64


def main() -> None:
    """Measures one row."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[_RANK.value]})
    library, _, how = _ROW.value.partition(" ")
    measured = ddp(how) if library == "ddp" else keras_fit(library, how)
    pathlib.Path(_OUT.value).write_text(json.dumps(measured))


def pictures(numpy: object) -> tuple:
    """This process's examples, the same in every library."""
    random = numpy.random.default_rng(_RANK.value)  # type: ignore[attr-defined]
    x = random.normal(size=(_BATCH, 32, 32, 3)).astype("float32")
    return x, random.integers(0, 10, _BATCH)


def summed_up(times: list[float], received_bytes: int, losses: list[float]) -> dict:
    """A row's figures: times of the measured steps, bytes of all of them."""
    steps = len(times)
    return {
        "milliseconds": 1000 * statistics.median(times),
        "megabytes": received_bytes / steps / 1e6,
        "losses": losses[:3] + losses[-1:],
    }


def keras_fit(kind: str, how: str) -> dict:
    """Keras's own `fit`: under TensorFlow's strategy (with what it lacks), or this toolkit's."""
    addresses = _ADDRESSES.value
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": _RANK.value}}
    )
    os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    import toolkit

    exchange = toolkit.strategies.GradientExchange(
        dtype=how if how in ("float16", "bfloat16") else "float32", bytes_per_pack=4 << 20
    )
    if how == "16 bits":
        exchange = toolkit.strategies.GradientExchange(dtype="float16")
    strategy = toolkit.strategies.create("multi_worker", gradients=exchange)

    import keras
    import numpy as np
    import tensorflow as tf

    if kind == "tensorflow":
        _as_keras_has_it()
    keras.utils.set_random_seed(1)
    exchange = {"exchange_dtype": "float16"} if how == "16 bits" else {}
    layers = keras.layers
    with strategy.scope():
        parts: list = [keras.Input((32, 32, 3))]
        for filters in (32, 64):
            parts += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
        parts.append(layers.Flatten())
        if kind == "hybrid":
            sharded = toolkit.parallel.ShardedDense
            parts.append(sharded(2048, activation="relu", keep_split=True, **exchange))
            parts.append(sharded(2048, activation="relu", split="inputs", **exchange))
        else:
            parts += [layers.Dense(2048, activation="relu"), layers.Dense(2048, activation="relu")]
        model = keras.Sequential([*parts, layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    x, y = pictures(np)

    def batches(_: tf.distribute.InputContext) -> tf.data.Dataset:
        options = tf.data.Options()
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensors((x, y)).cache().repeat().with_options(options)

    clock = _Clock()

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:  # noqa: ARG002 - Keras names it.
            self.model.reset_metrics()
            clock.begin(batch)

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            clock.end(batch, float((logs or {})["loss"]))

    data = strategy.distribute_datasets_from_function(batches)
    model.fit(data, steps_per_epoch=_WARM + STEPS.value, callbacks=[Steps()], verbose=0, shuffle=False)
    return clock.figures()


def _as_keras_has_it() -> None:
    """Gives Keras's optimizer its own methods back: every gradient in float32, in TensorFlow's order."""
    import keras

    for name in ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients"):
        setattr(keras.optimizers.Optimizer, name, getattr(keras.optimizers.Optimizer, name).__wrapped__)


class _Clock:
    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def begin(self, step: int) -> None:
        if step == _WARM:
            self.before = received()
            self.last = time.perf_counter()

    def end(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        if step >= _WARM:
            now = time.perf_counter()
            self.times.append(now - self.last)
            self.last = now
            self.after = received()

    def figures(self) -> dict:
        return summed_up(self.times, self.after - self.before, self.losses)


def ddp(how: str) -> dict:
    """PyTorch's DistributedDataParallel over gloo, with its float16 compression hook where asked."""
    import datetime

    import numpy as np
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.set_num_threads(1)
    torch.manual_seed(1)
    host, port = _ADDRESSES.value[0].split(":")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=_RANK.value,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )
    shared = nn.parallel.DistributedDataParallel(model)
    if how == "float16":
        shared.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(shared.parameters(), 0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    x, y = pictures(np)
    inputs, labels = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(y)
    clock = _Clock()
    for step in range(_WARM + STEPS.value):
        clock.begin(step)
        optimizer.zero_grad()
        loss = criterion(shared(inputs), labels)
        loss.backward()
        optimizer.step()
        clock.end(step, float(loss.detach()))
    figures = clock.figures()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return figures


if __name__ == "__main__":
    from absl import app

    app.run(lambda _: main())
