"""One of two processes that benchmarks.two_hosts starts: trains a while, and writes what it measured.

    python -m benchmarks.exchange_worker --row="hybrid float32" --rank=0 --addresses=A:P,B:P --out=FILE.json

SGD with momentum. Bytes are what the kernel received on the process's own interface while the steps ran.
"""

import inspect
import json
import math
import os
import pathlib
import statistics
import time
from typing import TYPE_CHECKING, Any

from absl import flags

from benchmarks import networks
from benchmarks.namespaces import received

if TYPE_CHECKING:
    import keras

ROWS = (
    "alone float32",
    "torch float32",
    "ddp float32",
    "ddp float16",
    "tp float32",
    "tensorflow float32",
    "data float32",
    "data float16",
    "hybrid float32",
    "hybrid 16 bits",
    "planned float32",
    "planned 16 bits",
    "powersgd float32",
    "powersgd float16",
    "local float32",
    "local float16",
)
NETWORK = flags.DEFINE_enum("network", "fc", networks.NAMES, "What is trained: see benchmarks/networks.py.")
_ROW = flags.DEFINE_enum("row", "data float32", list(ROWS), "What is measured.")
_RANK = flags.DEFINE_integer("rank", 0, "Which of the two this is.")
_ADDRESSES = flags.DEFINE_list("addresses", [], "Of both.")
_OUT = flags.DEFINE_string("out", None, "Where the measurements go.")
STEPS = flags.DEFINE_integer("steps", 30, "Steps measured.", lower_bound=5)
PACK = flags.DEFINE_integer(
    "bytes_per_pack", None, "Of gradients that this toolkit sends; its own default unless given."
)
_WARM = 8
_TORCH = ("torch", "ddp", "tp")
# Of "hybrid": what replicas share are all layers but convolutions.
_EVERY = 16  # Steps of "local" between two averages.
_CHOSEN = {"data": ("replicated", "replicated"), "hybrid": ("replicated", "sharded"), "planned": ("planned", "planned")}


def main() -> None:
    """Measures one row."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[_RANK.value]})
    library, _, how = _ROW.value.partition(" ")
    clock = _Clock(_EVERY if _ROW.value.startswith("local") else 1)
    if library in _TORCH:
        from benchmarks import torch_worker

        addresses, steps = _ADDRESSES.value, clock.steps()
        torch_worker.train(NETWORK.value, _ROW.value, rank=_RANK.value, addresses=addresses, steps=steps, clock=clock)
        figures = clock.figures()
    else:
        figures = keras_fit(library, how, clock)
    pathlib.Path(_OUT.value).write_text(json.dumps(figures))
    if library in _TORCH:
        os._exit(0)  # PyTorch aborts one process in forty as it ends: "terminate called without an active exception".


def keras_fit(kind: str, how: str, clock: "_Clock") -> dict:
    """Keras's own `fit`: without an exchange, under TensorFlow's strategy (with what it lacks), or this toolkit's."""
    addresses = _ADDRESSES.value
    if kind != "alone":
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": _RANK.value}}
        )
    os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    import toolkit

    dtype = "float16" if how == "16 bits" else how
    if kind == "local":
        how_exchanged: dict = {"local": toolkit.strategies.LocalSteps(every=_EVERY, dtype=dtype)}
    else:
        compression = "powersgd" if kind == "powersgd" else "none"
        exchange = toolkit.strategies.GradientExchange(
            dtype=dtype, compression=compression, rank=4, bytes_per_pack=PACK.value
        )
        how_exchanged = {"gradients": exchange}
    strategy = toolkit.strategies.create("one_device" if kind == "alone" else "multi_worker", **how_exchanged)

    import keras
    import tensorflow as tf

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.01, momentum=0.9)

    predicted = {}
    keras.utils.set_random_seed(1)
    if kind == "tensorflow":
        _as_keras_has_it()
    elif kind in _CHOSEN:
        network = networks.in_keras(NETWORK.value)
        activations = dtype if how == "16 bits" else "float32"
        batch = networks.BATCH[NETWORK.value]
        setting = toolkit.parallel.Setting(
            replicas=2, global_batch=batch * 2, gradient_dtype=dtype, activation_dtype=activations, slots=1
        )
        machine = toolkit.parallel.measure(network, strategy, global_batch=2 * batch, optimizer=optimizer(), slots=1)
        conv, fc = _CHOSEN[kind]
        plan = toolkit.parallel.choose(toolkit.parallel.costs(network), machine, setting, conv=conv, fc=fc)
        step = plan.step
        predicted = {"predicted": 1000 * step.seconds, "predicted_megabytes": step.received / 1e6}
    with strategy.scope():
        if kind in ("hybrid", "planned"):
            model = toolkit.parallel.parallelize(network, plan, exchange_dtype=activations)
        else:
            model = networks.in_keras(NETWORK.value)
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = networks.examples(NETWORK.value, _RANK.value)

    def batches(_: tf.distribute.InputContext) -> tf.data.Dataset:
        options = tf.data.Options()
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensors((x, y)).cache().repeat().with_options(options)

    class Steps(keras.callbacks.Callback):
        summed = 0.0

        def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:  # noqa: ARG002 - Keras names it.
            clock.begin(batch)

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            # Keras shows the mean of the epoch's steps. To reset it in each step takes two exchanges.
            before, self.summed = self.summed, (batch + 1) * float((logs or {})["loss"])
            clock.end(batch, self.summed - before)

    data = strategy.distribute_datasets_from_function(batches)
    model.fit(data, steps_per_epoch=clock.steps(), callbacks=[Steps()], verbose=0, shuffle=False)
    if kind == "powersgd":
        predicted["formula_megabytes"] = _factors(model, exchange.rank) * tf.as_dtype(dtype).size / 1e6
    return {**clock.figures(), **predicted}


def _factors(model: "keras.Model", rank: int) -> int:
    """Elements that PowerSGD sends in a step: rank * (n + m) of a matrix, and what isn't compressed (1905.13727)."""
    from toolkit.strategies.step.powersgd import matrix_shape, shrinks

    shapes = [variable.shape for variable in model.trainable_variables]
    return sum(rank * sum(matrix_shape(s)) if shrinks(s, rank) else math.prod(s) for s in shapes)


def _as_keras_has_it() -> None:
    """Gives Keras's optimizer its own methods back: every gradient in float32, in TensorFlow's order."""
    import keras

    for name in ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients"):
        setattr(keras.optimizers.Optimizer, name, inspect.unwrap(getattr(keras.optimizers.Optimizer, name)))


class _Clock:
    """Of each step; of a way that exchanges every so many steps only, of whole rounds of them."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.warm = max(_WARM, every)  # What averages is traced in the first round.
        self.times: list[float] = []
        self.losses: list[float] = []

    def steps(self) -> int:
        """How many to make: some that don't count, and whole rounds."""
        return self.warm + -(-STEPS.value // self.every) * self.every

    def begin(self, step: int) -> None:
        if step == self.warm:
            self.before, self.used = received(), time.process_time()
            self.last = time.perf_counter()

    def end(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        if step >= self.warm:
            now = time.perf_counter()
            self.times.append(now - self.last)
            self.last = now
            self.after, self.used_after = received(), time.process_time()

    def figures(self) -> dict[str, Any]:
        rounds = [statistics.mean(self.times[at : at + self.every]) for at in range(0, len(self.times), self.every)]
        return {
            "milliseconds": 1000 * statistics.median(rounds),
            "processor": 1000 * (self.used_after - self.used) / len(self.times),
            "megabytes": (self.after - self.before) / len(self.times) / 1e6,
            "losses": self.losses[:3] + self.losses[-1:],
        }


if __name__ == "__main__":
    from absl import app

    app.run(lambda _: main())
