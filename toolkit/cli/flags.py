"""The flags that every recipe shares, under the names that users and other programs rely on.

A recipe calls `define_shared` when it is imported, and reads the parsed values from
`absl.flags.FLAGS`. Values are checked by the parts they are handed to. What must not change between start and
resume is recorded by `recipe.open_run`: all flags that a recipe defines itself, and of these the seed and the rate.
"""

from absl import flags

from toolkit.strategies import GradientExchange
from toolkit.strategies.exchange import COMMUNICATIONS, DTYPES
from toolkit.strategies.parameter_servers import ParameterServerOptions
from toolkit.strategies.parameter_servers.options import PLACEMENTS

__all__ = [
    "define_activations",
    "define_cluster",
    "define_gradients",
    "define_mesh",
    "define_parameter_servers",
    "define_shared",
    "devices",
    "exchanges",
    "parameter_servers",
]


def define_shared(*, epochs: int, global_batch_size: int, learning_rate: float) -> None:
    """Defines the shared flags, with a recipe's own defaults for three of them."""
    devices_only()
    flags.DEFINE_enum(
        "data",
        "auto",
        ["auto", "cifar10", "shapes"],
        "Data set; auto takes a prepared CIFAR-10, or else the embedded shapes.",
    )
    flags.DEFINE_string(
        "data_dir", None, "TFDS's directory, or where cifar-10-binary.tar.gz lies. Default: TFDS's own."
    )
    flags.DEFINE_integer("epochs", epochs, "Epochs in all.", lower_bound=1)
    flags.DEFINE_integer(
        "steps_per_epoch", None, "Steps in an epoch. Default: once through the training set.", lower_bound=1
    )
    flags.DEFINE_integer("global_batch_size", global_batch_size, "Examples per step, over all replicas.", lower_bound=1)
    flags.DEFINE_float(
        "learning_rate", learning_rate, "Peak learning rate at a global batch of 128; it grows with the batch."
    )
    flags.DEFINE_integer("seed", 1, "Seed of weights, shuffle, augmentation and generated data.", lower_bound=0)
    flags.DEFINE_string(
        "run_dir", None, "Where checkpoints, history.csv and summary.json go. Default: runs/RECIPE-TIME."
    )
    flags.DEFINE_boolean(
        "resume", False, "Go on with the run in --run_dir (default: the newest of this recipe's in runs/)."
    )
    flags.DEFINE_integer(
        "checkpoint_steps", 0, "Write a checkpoint every so many steps too; 0: after each epoch only.", lower_bound=0
    )
    flags.DEFINE_integer("profile", 0, "Keep a profile of so many steps for TensorBoard; 0 for none.", lower_bound=0)


def define_cluster() -> None:
    """Defines the flags that say who takes part; without them the environment does."""
    flags.DEFINE_string("cluster", None, "File that describes the cluster, such as tf_configs/two_hosts.json.")
    flags.DEFINE_string("task", None, "Who this process is in it, such as worker:1.")
    flags.DEFINE_float(
        "start_timeout", None, "Seconds to wait for the other tasks. Default: 300, or the launcher's.", lower_bound=0
    )


def define_parameter_servers() -> None:
    """Defines the flags that say how parameter servers are used."""
    flags.DEFINE_enum(
        "variables",
        "round_robin",
        list(PLACEMENTS),
        "Which ps holds a variable: the next, the one with the fewest bytes, or several where it is large.",
    )
    flags.DEFINE_integer("shards", None, "Parts of each sharded variable. Default: one on each ps.")
    flags.DEFINE_integer("min_shard_kib", 256, "No part of a sharded variable is smaller.")
    flags.DEFINE_boolean("synchronous", False, "Rounds: the workers share each batch, and apply gradients together.")
    flags.DEFINE_integer("max_staleness", None, "Most updates that a gradient may be late by. Default: any number.")
    flags.DEFINE_integer("steps_per_dispatch", None, "Steps a worker is sent at once. Default: by their length.")


def define_gradients(*, between_processes: bool = True) -> None:
    """Defines the flags that say how replicas exchange gradients, and who keeps what an optimizer remembers."""
    flags.DEFINE_enum(
        "gradient_dtype", "float32", list(DTYPES), "Communication dtype of gradients, which are added in it too."
    )
    if between_processes:
        flags.DEFINE_enum("communication", "auto", list(COMMUNICATIONS), "Between processes; auto: NCCL with GPUs.")
    flags.DEFINE_integer("bytes_per_pack", 0, "Gradients are joined up to so many bytes; 0 for all in one pack.")
    flags.DEFINE_boolean("shard_optimizer", False, "Each replica keeps its part of the optimizer's state (ZeRO 1).")


def devices_only() -> None:
    """Defines the flags that say which devices to use."""
    flags.DEFINE_integer(
        "gpus", None, "Replicas. Default: all GPUs, or one CPU device where there is none.", lower_bound=1
    )
    flags.DEFINE_enum(
        "emulate",
        "auto",
        ["auto", "never", "always"],
        "Whether CPU devices stand in for GPUs: auto if there is no GPU at all.",
    )
    flags.DEFINE_string(
        "visible_devices",
        None,
        "GPUs to use, by nvidia-smi's number or UUID, such as 0,2; free: those nobody uses; -1: none.",
    )
    flags.DEFINE_string("memory", "growth", "Of each GPU: growth, a fraction such as 0.4, a limit in MiB, or all.")
    flags.DEFINE_integer("split_gpus", 1, "Logical devices on each GPU.", lower_bound=1)
    flags.DEFINE_integer("inter_op_threads", 0, "Operations run at once; 0 for TensorFlow's choice.", lower_bound=0)
    flags.DEFINE_integer(
        "intra_op_threads", 0, "Threads inside one operation; 0 for TensorFlow's choice.", lower_bound=0
    )
    flags.DEFINE_boolean("soft_placement", True, "Let an operation without a kernel for its device run elsewhere.")
    flags.DEFINE_boolean("native_logs", False, "Show TensorFlow's own start-up notes, too.")
    flags.DEFINE_boolean("log_placement", False, "Log where each operation runs.")


def define_activations() -> None:
    """Defines the flag that says how activations are exchanged between the shards of a layer."""
    flags.DEFINE_enum("activation_dtype", "float32", list(DTYPES), "Communication dtype of activations.")


def define_mesh() -> None:
    """Defines the flag that says how replicas are divided into groups for sharded layers."""
    flags.DEFINE_integer(
        "shards", None, "Replicas that hold one copy of sharded layers between them. Default: all.", lower_bound=1
    )


def devices() -> dict:
    """Returns the parsed device flags as arguments of `toolkit.devices.configure`."""
    values = flags.FLAGS
    names = ("gpus", "emulate", "visible_devices", "memory", "inter_op_threads", "intra_op_threads")
    arguments = {name: values[name].value for name in (*names, "soft_placement", "log_placement")}
    return {**arguments, "split": values["split_gpus"].value}


def exchanges() -> dict:
    """Returns what the flags of `define_gradients` and `define_mesh` say, as arguments of `strategies.create`.

    Raises:
        StrategyError: A value is none that it can be.
    """
    values = flags.FLAGS
    gradients = GradientExchange(dtype=values["gradient_dtype"].value, bytes_per_pack=values["bytes_per_pack"].value)
    others = {name: values[name].value for name in ("communication", "shards") if name in values}
    state = "sharded" if values["shard_optimizer"].value else "replicated"
    return {"gradients": gradients, "optimizer_state": state, **others}


def parameter_servers() -> ParameterServerOptions:
    """Returns what the flags of `define_parameter_servers` say.

    Raises:
        StrategyError: A value is none that it can be.
    """
    values = flags.FLAGS
    names = ("variables", "shards", "synchronous", "max_staleness", "steps_per_dispatch")
    arguments = {name: values[name].value for name in names}
    return ParameterServerOptions(**arguments, min_shard_bytes=values["min_shard_kib"].value << 10)
