"""Trains one model with each way to divide its layers, and compares predictions with measurements."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import rich
import tensorflow as tf
from absl import flags
from rich import box
from rich.table import Table

from toolkit import models, parallel
from toolkit.cli.console import say
from toolkit.cli.from_flags import load_batches
from toolkit.data import Batches
from toolkit.strategies import mesh
from toolkit.training import Run, StepTimer


def train_ways(
    run: Run,
    strategy: tf.distribute.Strategy,
    ways: Sequence[tuple[str, str]],
    optimizer: Callable[[], Any],
    *,
    slots: int,
) -> None:
    """Trains the model of the flags once for each way to divide its layers, and prints a table.

    It measures the devices, and the network between them, at the start. `run` keeps only the last training.

    Args:
        run: The run, as `open_run` has opened it.
        strategy: What it trains under.
        ways: For each training, how convolutions are divided and how all other layers are: "replicated", "sharded" or
            "planned".
        optimizer: Makes a new Keras optimizer for each model.
        slots: Elements that the optimizer keeps for each element of a weight.
    """
    values = flags.FLAGS
    batches = load_batches(run, strategy, steps_per_epoch=25)
    keras.utils.set_random_seed(values.seed)
    plain = models.build(values.model, classes=len(batches.examples.classes))
    setting = parallel.Setting(
        replicas=batches.replicas,
        global_batch=batches.global_batch_size,
        gradient_dtype=values.gradient_dtype,
        gradient_rank=values.gradient_rank if values.gradient_compression == "powersgd" else None,
        activation_dtype=values.activation_dtype,
        slots=slots,
        shards=mesh.mesh_of(strategy).shards,
        optimizer_state="sharded" if values.shard_optimizer else "replicated",
        weights="sharded" if values.shard_weights else "replicated",
        batch_statistics=values.batch_statistics,
    )
    machine = parallel.measure(
        plain, strategy, global_batch=batches.global_batch_size, optimizer=optimizer(), slots=slots
    )
    costs = parallel.costs(plain)
    rows = []
    for number, (conv, fc) in enumerate(ways, start=1):
        say(f"{number} of {len(ways)}: convolutions {conv}, other layers {fc}")
        plan = parallel.choose(costs, machine, setting, conv=conv, fc=fc)
        keras.utils.set_random_seed(values.seed)
        with strategy.scope():
            model = parallel.parallelize(plain, plan, exchange_dtype=values.activation_dtype)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer(), loss, metrics=["accuracy"])
        rows.append(_trained(run, model, batches, plan, conv, fc, stays=number == len(ways)))
    run.add_facts(parallelism=rows)
    _show(rows)


def _trained(
    run: Run, model: Any, batches: Batches, plan: parallel.Plan, conv: str, fc: str, *, stays: bool
) -> dict[str, Any]:
    """Returns the entry for `summary.json` under "parallelism".

    Where replicas share a process there are no measured bytes, and after too few steps no measured seconds: None.
    """
    meter = StepTimer(run.membership)
    epochs = flags.FLAGS.epochs
    history: Any
    if stays:
        history = run.fit(model, batches, epochs=epochs, validation_data=batches.test(), callbacks=[meter])
    else:
        steps = batches.steps_per_epoch
        once = {"epochs": epochs, "steps_per_epoch": steps, "shuffle": False, "verbose": 0}
        history = model.fit(batches.train(), callbacks=[meter], **once)
    return {
        "conv": conv,
        "fc": fc,
        "predicted_seconds": plan.step.seconds,
        "measured_seconds": meter.seconds,
        "predicted_bytes": plan.step.received,
        "measured_bytes": meter.received,
        "parameters": plan.step.parameters,
        "loss": history.history["loss"][-1],
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints predictions and measurements of several ways to divide a model in one table."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    shown.add_column("conv", no_wrap=True)
    shown.add_column("FC", no_wrap=True)
    headings = ("ms/step\npredict.", "\nmeasured", "MB recv.\npredict.", "\nmeasured", "weights\nmillion", "\nloss")
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)

    def scaled(value: float | None, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value * scale:,.{digits}f}"

    for row in rows:
        shown.add_row(
            row["conv"],
            row["fc"],
            *(scaled(row[f"{what}_seconds"], 1e3, 1) for what in ("predicted", "measured")),
            *(scaled(row[f"{what}_bytes"], 1e-6, 2) for what in ("predicted", "measured")),
            scaled(row["parameters"], 1e-6, 2),
            f"{row['loss']:.4f}",
        )
    console = rich.get_console()
    console.print()
    console.print(shown)
