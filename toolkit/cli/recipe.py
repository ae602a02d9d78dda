"""What every recipe does with its parsed flags before it comes to its strategy, and after training."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from absl import flags

from toolkit import cluster, devices
from toolkit.cli.flags import devices as device_arguments
from toolkit.cli.log import show_devices
from toolkit.data import Batches
from toolkit.errors import RequestError
from toolkit.observe import report
from toolkit.training import Run

__all__ = ["check_same", "configure_devices", "open_run"]

# A recipe's names of what Keras and `Run` call so.
_NAMES = {
    "train_loss": "loss",
    "train_accuracy": "accuracy",
    "test_loss": "val_loss",
    "test_accuracy": "val_accuracy",
    "images_per_second": "examples_per_second",
}
# All tasks must have the same of these, though they may change on resume.
_EXCHANGES = ("gradient_dtype", "bytes_per_pack", "activation_dtype", "shards", "shard_optimizer")


@contextlib.contextmanager
def open_run(recipe: str, *, needs_cluster: bool = False, can_resume: bool = True) -> Iterator[Run]:
    """Opens the run that the flags describe, and writes the page about it when it has come to its end.

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
        profile=values["profile"].value or True,
        membership=membership,
        chief=True if membership is None else None,
    ) as run:
        run.record_config(**_config())
        yield run
        report.write_after(run)


class _RecipeRun(Run):
    """A run whose summary has the figures by the names that recipes give them, too."""

    def described(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns the summary with them."""
        return {**summary, **{name: summary.get(theirs) for name, theirs in _NAMES.items()}}


def configure_devices() -> devices.Setup:
    """Configures the devices of this process as the flags say, and shows them.

    Raises:
        DeviceError: What the flags ask for can't be met on this machine.
    """
    setup = devices.configure(**device_arguments())
    show_devices(setup)
    return setup


def check_same(run: Run, strategy: Any, batches: Batches) -> None:
    """Makes sure that all tasks were started with the same flags and data, before they build a model together.

    Raises:
        StrategyError: On every task, where any two differ.
    """
    exchanges = {name: flags.FLAGS[name].value for name in _EXCHANGES if name in flags.FLAGS}
    run.check_same(strategy, **batches.config(), steps_per_epoch=batches.steps_per_epoch, **exchanges)


def _config() -> dict[str, Any]:
    ours = ("absl.", "toolkit.")
    own = [
        flag.name
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if not module.startswith(ours)
        for flag in defined
    ]
    return {name: flags.FLAGS[name].value for name in (*own, "seed", "learning_rate")}
