"""The flags that every recipe shares. Users and other programs rely on their names.

A recipe calls `define_shared` when it is imported, and reads the parsed values from
`absl.flags.FLAGS`. Values are checked by the parts they are handed to. What must not change between start and
resume is recorded by `from_flags.open_run`: all flags that a recipe defines itself, and of these the seed and the rate.
"""

from absl import flags

from toolkit.strategies import GradientExchange, LocalSteps
from toolkit.strategies.options import (
    BATCH_STATISTICS,
    COMMUNICATIONS,
    COMPRESSIONS,
    DTYPES,
    PLACEMENTS,
    ParameterServerOptions,
)

# The order of `--help`: a group's title, and its flags, each with the placeholder for its value.
_GROUPS = {
    "Training": "epochs=N steps_per_epoch=N global_batch_size=N learning_rate=RATE seed=N",
    "Data": "data data_dir=DIR",
    "The run's directory": "run_dir=DIR copy_to=URL resume checkpoint_steps=N profile=N",
    "Devices": "gpus=N visible_devices=LIST memory=HOW split_gpus=N emulate inter_op_threads=N intra_op_threads=N "
    "soft_placement log_placement native_logs",
    "Several processes": "cluster=FILE task=TASK start_timeout=SECONDS communication",
    "Exchange": "gradient_dtype activation_dtype bytes_per_pack=BYTES gradient_compression gradient_rank=N "
    "gradient_start_step=N local_steps=N local_outer_momentum=M local_outer_rate=RATE batch_statistics",
    "Parameter servers": "synchronous max_staleness=N steps_per_dispatch=N variables",
    "Shards": "shards=N min_shard_kib=KIB shard_optimizer shard_weights",
}
GROUPS = {title: dict(word.partition("=")[::2] for word in words.split()) for title, words in _GROUPS.items()}


# Whose flags are no recipe's. TensorFlow defines some where it is imported, and their values depend on when that is.
_LIBRARIES = ("absl.", "tensorflow.", "tensorflow_datasets.", "keras.")


def defined(*, without: tuple[str, ...] = ()) -> list[flags.Flag]:
    """Returns the flags of recipes and of this toolkit, by name.

    Args:
        without: How the names of other modules begin whose flags are left out.
    """
    found = [
        flag
        for module, own in flags.FLAGS.flags_by_module_dict().items()
        if not module.startswith((*_LIBRARIES, *without))
        for flag in own
    ]
    return sorted(found, key=lambda flag: flag.name)


def define_shared(*, epochs: int, global_batch_size: int, learning_rate: float) -> None:
    """Defines the shared flags, with a recipe's own defaults for three of them."""
    define_devices()
    flags.DEFINE_enum(
        "data",
        "auto",
        ["auto", "cifar10", "shapes"],
        "Data set. auto takes CIFAR-10 if it is prepared on this machine, else the embedded shapes.",
    )
    flags.DEFINE_string(
        "data_dir", None, "TFDS's data directory, or the one with cifar-10-binary.tar.gz. Default: TFDS's own."
    )
    flags.DEFINE_integer("epochs", epochs, "Epochs to train, counted from the run's start.", lower_bound=1)
    flags.DEFINE_integer(
        "steps_per_epoch", None, "Steps in an epoch. Default: as many as the training set has batches.", lower_bound=1
    )
    flags.DEFINE_integer(
        "global_batch_size", global_batch_size, "Examples per step, over all replicas together.", lower_bound=1
    )
    flags.DEFINE_float(
        "learning_rate", learning_rate, "Peak learning rate for a global batch of 128; it is scaled with the batch."
    )
    flags.DEFINE_integer("seed", 1, "Seed of weights, shuffling, augmentation and generated data.", lower_bound=0)
    flags.DEFINE_string(
        "run_dir", None, "Directory for checkpoints, history.csv and summary.json. Default: runs/RECIPE-TIME."
    )
    flags.DEFINE_string(
        "copy_to",
        None,
        "Also copy the run directory to this URL, such as s3://bucket/mine. A run resumes from there if it is newer.",
    )
    flags.DEFINE_boolean(
        "resume", False, "Continue the run in --run_dir; without it, this recipe's newest run in runs/."
    )
    flags.DEFINE_integer(
        "checkpoint_steps", 0, "Steps between checkpoints. 0 writes one after each epoch only.", lower_bound=0
    )
    flags.DEFINE_integer("profile", 0, "Steps to profile for TensorBoard. 0 keeps no profile.", lower_bound=0)


def define_cluster() -> None:
    """Defines the flags for the cluster; without them, the environment describes it."""
    flags.DEFINE_string(
        "cluster",
        None,
        "Description of the cluster, such as tf_configs/two_hosts.json. Default: TF_CONFIG or the launcher.",
    )
    flags.DEFINE_string("task", None, "This process in the cluster, such as worker:1.")
    flags.DEFINE_float(
        "start_timeout", None, "Longest wait for the other tasks. Default: 300, or the launcher's.", lower_bound=0
    )


def define_parameter_servers() -> None:
    """Defines the flags for parameter servers."""
    flags.DEFINE_enum(
        "variables",
        "round_robin",
        list(PLACEMENTS),
        "round_robin: each variable on the next ps. balanced: on the ps with the fewest bytes. sharded: balanced, and "
        "large variables split over several ps.",
    )
    flags.DEFINE_integer("shards", None, "Shards of each sharded variable. Default: one on each ps.")
    flags.DEFINE_integer("min_shard_kib", 256, "Smallest shard of a variable.")
    flags.DEFINE_boolean("synchronous", False, "Split each batch over the workers and apply their gradients together.")
    flags.DEFINE_integer("max_staleness", None, "Highest staleness of a gradient, in updates. Default: no limit.")
    flags.DEFINE_integer(
        "steps_per_dispatch", None, "Steps sent to a worker at once. Default: chosen by their duration."
    )


def define_gradients(*, between_processes: bool = True) -> None:
    """Defines the flags for exchanging gradients and for the optimizer's state."""
    flags.DEFINE_enum("gradient_dtype", "float32", list(DTYPES), "Dtype in which gradients are exchanged and added.")
    flags.DEFINE_enum(
        "gradient_compression",
        "none",
        list(COMPRESSIONS),
        "powersgd: send two thin factors of each matrix's gradient. Other numbers than one device's.",
    )
    flags.DEFINE_integer("gradient_rank", 4, "Columns of the factors of powersgd.", lower_bound=1)
    flags.DEFINE_integer("gradient_start_step", 0, "Steps before powersgd begins.", lower_bound=0)
    flags.DEFINE_integer(
        "local_steps",
        0,
        "Steps that replicas make by themselves between two averages. 0: gradients are exchanged in each step. Other "
        "numbers than one device's.",
        lower_bound=0,
    )
    flags.DEFINE_float("local_outer_rate", 1.0, "Rate of what averages change; 0.7 in DiLoCo.")
    flags.DEFINE_float("local_outer_momentum", 0.0, "Momentum of what averages change; 0.9 in DiLoCo.")
    if between_processes:
        flags.DEFINE_enum(
            "communication",
            "auto",
            list(COMMUNICATIONS),
            "Library for collectives between processes. auto takes NCCL with GPUs.",
        )
    flags.DEFINE_integer(
        "bytes_per_pack", None, "Gradients are exchanged in packs of at most this size; 0 makes one. Default: 512 KiB."
    )
    flags.DEFINE_boolean("shard_optimizer", False, "Split the optimizer's state over the replicas (ZeRO 1).")
    flags.DEFINE_boolean(
        "shard_weights", False, "Split weights, gradients and optimizer state over the replicas (FSDP, ZeRO 3)."
    )
    flags.DEFINE_enum(
        "batch_statistics",
        "batch",
        list(BATCH_STATISTICS),
        "batch: BatchNormalization normalises the whole batch. replica: each replica normalises its own share. Other "
        "numbers than one device's.",
    )


def define_devices() -> None:
    """Defines the flags for devices."""
    flags.DEFINE_integer(
        "gpus", None, "Replicas in this process. Default: all GPUs, or one CPU device if there is none.", lower_bound=1
    )
    flags.DEFINE_enum(
        "emulate",
        "auto",
        ["auto", "never", "always"],
        "Let CPU devices stand in for GPUs. auto does so if there is no GPU at all.",
    )
    flags.DEFINE_string(
        "visible_devices",
        None,
        "GPUs to use, by nvidia-smi's numbers or UUIDs, such as 0,2. free takes unused ones, -1 none.",
    )
    flags.DEFINE_string(
        "memory", "growth", "GPU memory to take: growth (as needed), a fraction such as 0.4, a limit in MiB, or all."
    )
    flags.DEFINE_integer("split_gpus", 1, "Logical devices on each GPU.", lower_bound=1)
    flags.DEFINE_integer(
        "inter_op_threads", 0, "Operations run at the same time. 0: TensorFlow decides.", lower_bound=0
    )
    flags.DEFINE_integer("intra_op_threads", 0, "Threads inside one operation. 0: TensorFlow decides.", lower_bound=0)
    flags.DEFINE_boolean("soft_placement", True, "Run an operation on another device if its own has no kernel for it.")
    flags.DEFINE_boolean("native_logs", False, "Show TensorFlow's own start-up lines.")
    flags.DEFINE_boolean("log_placement", False, "Log where each operation runs.")


def define_activations() -> None:
    """Defines the flag for the communication dtype of activations between the shards of a layer."""
    flags.DEFINE_enum("activation_dtype", "float32", list(DTYPES), "Dtype in which activations are exchanged.")


def define_mesh() -> None:
    """Defines the flag for the number of shards in each group of replicas."""
    flags.DEFINE_integer(
        "shards", None, "Replicas that together hold one copy of the sharded layers. Default: all.", lower_bound=1
    )


def devices() -> dict:
    """Returns the parsed device flags as arguments of `toolkit.devices.configure`."""
    values = flags.FLAGS
    names = ("gpus", "emulate", "visible_devices", "memory", "inter_op_threads", "intra_op_threads")
    arguments = {name: values[name].value for name in (*names, "soft_placement", "log_placement")}
    return {**arguments, "split": values["split_gpus"].value}


def exchanges() -> dict:
    """Returns the flags of `define_gradients` and `define_mesh` as arguments of `strategies.create`.

    Raises:
        StrategyError: A value is out of its range.
    """
    values = flags.FLAGS
    local_steps = values["local_steps"].value
    gradients = GradientExchange(
        dtype="float32" if local_steps else values["gradient_dtype"].value,
        bytes_per_pack=values["bytes_per_pack"].value,
        compression=values["gradient_compression"].value,
        rank=values["gradient_rank"].value,
        start_step=values["gradient_start_step"].value,
    )
    others = {name: values[name].value for name in ("communication", "shards") if name in values}
    kept = {"optimizer_state": "shard_optimizer", "weights": "shard_weights"}
    kept = {name: "sharded" if values[flag].value else "replicated" for name, flag in kept.items()}
    if local_steps:
        others["local"] = LocalSteps(
            every=local_steps,
            dtype=values["gradient_dtype"].value,
            outer_rate=values["local_outer_rate"].value,
            outer_momentum=values["local_outer_momentum"].value,
        )
    statistics = values["batch_statistics"].value
    return {"gradients": gradients, **kept, "batch_statistics": statistics, **others}


def parameter_servers() -> ParameterServerOptions:
    """Returns the flags of `define_parameter_servers` as options.

    Raises:
        StrategyError: A value is out of its range, or two exclude each other.
    """
    values = flags.FLAGS
    names = ("variables", "shards", "synchronous", "max_staleness", "steps_per_dispatch")
    arguments = {name: values[name].value for name in names}
    return ParameterServerOptions(**arguments, min_shard_bytes=values["min_shard_kib"].value << 10)
