"""What every recipe does with its flags before it has a strategy, and after training."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from absl import flags

from toolkit import cluster, devices, strategies
from toolkit.cli.console import show_devices
from toolkit.cli.flags import GROUPS, defined, exchanges
from toolkit.cli.flags import devices as device_arguments
from toolkit.data import Batches, load
from toolkit.errors import RequestError
from toolkit.observe import report
from toolkit.training import Run
from toolkit.training import learning_rate as scheduled

# A recipe's names for entries of Keras's logs and `Run`'s summary.
_NAMES = {
    "train_loss": "loss",
    "train_accuracy": "accuracy",
    "test_loss": "val_loss",
    "test_accuracy": "val_accuracy",
    "images_per_second": "examples_per_second",
}
# All tasks must agree on these values, but they may change on resume.
_EXCHANGES = (*GROUPS["Exchange"], "shards", "shard_optimizer", "shard_weights")


@contextlib.contextmanager
def open_run(recipe: str, *, needs_cluster: bool = False, can_resume: bool = True) -> Iterator[Run]:
    """Opens the run that the flags describe, and writes its report at the end.

    What must not change between start and resume is recorded: the recipe's own flags, the seed and the learning rate.
    Where there are several GPUs, the program first starts itself again, so that CUDA numbers them as nvidia-smi does.

    Args:
        recipe: The recipe's name.
        needs_cluster: Whether it runs in several processes only.
        can_resume: Whether --resume means something to it.

    Raises:
        RequestError: --resume is given to a recipe that can't.
        ClusterError: A cluster is needed and nothing describes one, or what does can't be used.
        RunDirectoryError: The run directory can't be used for this run.
        CheckpointError: There is nothing to resume, or it was started with other flags.
    """
    values = flags.FLAGS
    if values["resume"].value and not can_resume:
        raise RequestError(
            asked="--resume", found=f"{recipe} can't resume: it compares whole trainings", remedy="Leave --resume out"
        )
    devices.restart(values["visible_devices"].value)
    membership = None
    if "cluster" in values:
        find = cluster.require if needs_cluster else cluster.discover
        membership = find(os.environ, file=values["cluster"].value, task=values["task"].value)
    with _RecipeRun(
        values["run_dir"].value,
        recipe=recipe,
        resume=values["resume"].value,
        checkpoint_steps=values["checkpoint_steps"].value,
        copy_to=values["copy_to"].value,
        profile=values["profile"].value or True,
        membership=membership,
        chief=True if membership is None else None,
    ) as run:
        run.record_config(**_config())
        yield run
        report.write_after(run)


class _RecipeRun(Run):
    """A run whose summary also has the figures under the recipes' names."""

    def described(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns the summary with these names added."""
        return {**summary, **{name: summary.get(theirs) for name, theirs in _NAMES.items()}}


def create_strategy(run: Run, name: str = "", **options: Any) -> Any:
    """Configures and prints the devices, and creates a strategy from the flags.

    Args:
        run: Who takes part.
        name: As for `toolkit.strategies.create`; "" for multi_worker in a cluster, mirrored elsewhere.
        options: What no flag of every recipe says, as for `toolkit.strategies.create`.

    Raises:
        DeviceError: What the flags ask for can't be met on this machine.
    """
    setup = devices.configure(**device_arguments())
    show_devices(setup)
    name = name or ("mirrored" if run.membership is None else "multi_worker")
    if "gradient_dtype" in flags.FLAGS:
        options |= exchanges()
    if "start_timeout" in flags.FLAGS:
        options["start_timeout"] = flags.FLAGS.start_timeout
    return strategies.create(name, devices=setup.logical_devices, membership=run.membership, **options)


def load_batches(run: Run, strategy: Any, *, steps_per_epoch: int | None = None) -> Batches:
    """Loads the data of the flags in global batches, the same for all tasks.

    Args:
        run: Whose tasks train together.
        strategy: Whose replicas share each batch.
        steps_per_epoch: Where the flags name none; None for all of the data.

    Raises:
        DataError: The data can't be had.
        StrategyError: On every task, where any two were started with other flags or data.
    """
    values = flags.FLAGS
    batches = Batches(
        examples=load(values.data, data_dir=values.data_dir, seed=values.seed),
        strategy=strategy,
        global_batch_size=values.global_batch_size,
        seed=values.seed,
        steps_per_epoch=values.steps_per_epoch or steps_per_epoch,
    )
    same = {name: values[name].value for name in _EXCHANGES if name in values}
    run.check_same(strategy, **batches.config(), steps_per_epoch=batches.steps_per_epoch, **same)
    return batches


def learning_rate(batches: Batches, **options: Any) -> Any:
    """Returns the schedule of --learning_rate over --epochs; options are those of `toolkit.training.learning_rate`."""
    values = flags.FLAGS
    steps = values.epochs * batches.steps_per_epoch
    return scheduled(values.learning_rate, global_batch_size=batches.global_batch_size, total_steps=steps, **options)


def _config() -> dict[str, Any]:
    own = [flag.name for flag in defined(without=("toolkit.",))]
    return {name: flags.FLAGS[name].value for name in (*own, "seed", "learning_rate")}
