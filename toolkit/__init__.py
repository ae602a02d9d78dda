"""Train one unmodified Keras 3 script on several devices with TensorFlow's distribution strategies.

Rooms, each importing only those above it:

    errors      every exception
    digests     the SHA-256 of a file
    secrecy     which variables and flags hold secrets, and texts without them
    modes       files that not everybody may write
    wrapping    a function of somebody else's, wrapped once
    stops       signals that ask a program to stop, noted
    status      what a task tells the launcher that started it
    cluster     who takes part: TF_CONFIG, what is wrong with it, and where else a cluster is found
    devices     what this process may use
    parameter_servers  variables on parameter servers, and steps handed out to workers
    strategies  how variables and gradients are shared
    parallel    which layers are replicated and which are split
    placement   which device each operation and variable is on
    data        CIFAR-10, a generated stand-in, and global-batch pipelines
    models      CIFAR-10 models: a conv trunk joined to an FC head
    training    run directory, checkpoints, exact resume, callbacks
    launch      starting and watching tasks
    scaling     how a recipe's speed grows with replicas, and what bounds it
    report      one HTML page about a run, or several compared
    slurm       jobs under Slurm: batch script, submission, restarts
    ssh         one job on several hosts by ssh
    kubernetes  manifests for Kubernetes
    doctor      what is wrong with this machine, and the command that mends it
    cli         flags and exit codes of a recipe; the `toolkit` command

`import toolkit` costs next to nothing: a room is imported when it is first named, and TensorFlow
when a function that needs it is first called.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "cli",
    "cluster",
    "data",
    "devices",
    "digests",
    "doctor",
    "errors",
    "kubernetes",
    "launch",
    "models",
    "modes",
    "parallel",
    "parameter_servers",
    "placement",
    "report",
    "scaling",
    "secrecy",
    "slurm",
    "ssh",
    "status",
    "stops",
    "strategies",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
