"""Replaces TensorFlow's names of strategies by ours in scripts that don't import this toolkit."""

import logging
import os
from collections.abc import Callable
from typing import Any

__all__ = ["guard_fit", "patch_strategies"]

_LOG = logging.getLogger(__name__)


def patch_strategies(tensorflow: Any) -> None:
    """Replaces two of TensorFlow's strategy classes by functions that create ours and log it.

    They are `tf.distribute.MultiWorkerMirroredStrategy` and `ParameterServerStrategy`. A name stays a
    class, which scripts and Keras use with isinstance, and is made ours only when the script asks
    for it: the toolkit's strategies import Keras.

    Args:
        tensorflow: The module, just imported.
    """
    _stand_in(tensorflow, "MultiWorkerMirroredStrategy", _multi_worker)
    _stand_in(tensorflow, "ParameterServerStrategy", _parameter_server)


def guard_fit(keras: Any) -> None:
    """Makes `fit` refuse to train in a worker or ps that serves a chief.

    A script that doesn't serve there would train as often as it was launched.

    Args:
        keras: The module, just imported.
    """
    from toolkit.cluster import discover
    from toolkit.errors import StrategyError
    from toolkit.support.wrapping import wrap

    found = discover(os.environ)
    if found is None or found.task.job not in ("worker", "ps") or "ps" not in {t.job for t in found.cluster.tasks}:
        return

    def refuse(_: Callable, *_args: Any, **_kwargs: Any) -> None:
        raise StrategyError(
            asked=f"{found.task} calls fit, evaluate or predict",
            found="in a job with parameter servers only the chief trains, and workers and ps serve it",
            remedy="Call toolkit.strategies.create() first: it serves the chief here. Or train in the chief only",
        )

    wrap(keras.callbacks.CallbackList, "set_model", refuse)


def _stand_in(tensorflow: Any, name: str, make: Callable) -> None:
    original = getattr(tensorflow.distribute, name)

    class Patched(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not stand_in:
                return super().__call__(*args, **kwargs)
            # A warning, because scripts don't show information.
            _LOG.warning(
                "toolkit: the launcher replaced tf.distribute.%s by a subclass that works with Keras 3's fit; "
                "launch with --as_is to keep TensorFlow's own",
                name,
            )
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is stand_in else super().__instancecheck__(instance)

    stand_in = Patched(original.__name__, (original,), {"__doc__": original.__doc__})
    for home in (tensorflow.distribute, tensorflow.distribute.experimental):
        setattr(home, name, stand_in)


def _multi_worker(*args: Any, communication: Any = None, **kwargs: Any) -> Any:
    """Creates our strategy for either of TensorFlow's. The experimental one takes the communication first."""
    import tensorflow as tf

    from toolkit.strategies.multi_worker import MultiWorkerStrategy

    if args and isinstance(args[0], tf.distribute.experimental.CommunicationImplementation):
        communication, args = args[0], args[1:]
    if communication is not None:
        kwargs["communication_options"] = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    return MultiWorkerStrategy(*args, **kwargs)


def _parameter_server(cluster_resolver: Any, variable_partitioner: Any = None) -> Any:
    """Creates our strategy. A partitioner means that large variables are sharded, in this toolkit's way."""
    from toolkit.cluster import Cluster, Task
    from toolkit.strategies.options import ParameterServerOptions
    from toolkit.strategies.parameter_servers import strategy

    cluster = Cluster(cluster_resolver.cluster_spec().as_dict())
    task = Task(cluster_resolver.task_type or "chief", cluster_resolver.task_id or 0)
    options = ParameterServerOptions(variables="sharded" if variable_partitioner is not None else "round_robin")
    return strategy.create(cluster, task, options=options)
