"""Train one unmodified Keras 3 script on several devices with TensorFlow's distribution strategies.

Wings, in the order in which a run meets them; each imports only those above it:

    errors      every exception
    support     what all rooms need: whole files, redaction, signals, status
    cluster     who takes part: TF_CONFIG, what is wrong with it, and where else a cluster is found
    devices     what this process may use
    strategies  how variables and gradients are shared
    parallel    which layers are replicated and which are sharded
    data        CIFAR-10, a generated stand-in, and global-batch pipelines
    models      CIFAR-10 models, a conv trunk joined to an FC head; a user's model from its file
    training    around `fit`: run directory, exact resume, summary
    launch      starting and watching tasks, on this machine or others
    observe     seeing the machine and the run: doctor, placement, report, scaling
    cli         flags and exit codes of a recipe; the `toolkit` command

`import toolkit` costs next to nothing: a wing is imported when it is first named, and TensorFlow
when a function that needs it is first called.
"""

import lazy_loader

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "cli",
    "cluster",
    "data",
    "devices",
    "errors",
    "launch",
    "models",
    "observe",
    "parallel",
    "strategies",
    "training",
]

__getattr__, __dir__, _ = lazy_loader.attach(__name__, __all__[1:])
