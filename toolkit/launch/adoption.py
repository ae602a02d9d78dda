"""TensorFlow's name for its strategy, given to ours, in scripts that know nothing of this toolkit."""

import logging
from typing import Any

__all__ = ["adopt"]

_LOG = logging.getLogger(__name__)


def adopt(tensorflow: Any) -> None:
    """Lets `tf.distribute.MultiWorkerMirroredStrategy()` make a `MultiWorkerStrategy`, and says so when it does.

    The name stays a class, which scripts and Keras use with isinstance, and is made ours only when
    the script asks for it: the toolkit's strategies import Keras.

    Args:
        tensorflow: The module, just imported.
    """
    original = tensorflow.distribute.MultiWorkerMirroredStrategy

    class Adopted(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return _made(*args, **kwargs) if cls is stand_in else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is stand_in else super().__instancecheck__(instance)

    stand_in = Adopted(original.__name__, (original,), {"__doc__": original.__doc__})
    for home in (tensorflow.distribute, tensorflow.distribute.experimental):
        home.MultiWorkerMirroredStrategy = stand_in


def _made(*args: Any, **kwargs: Any) -> Any:
    from toolkit.strategies.multi_worker import MultiWorkerStrategy

    # A warning, because scripts don't show what is merely informative.
    _LOG.warning(
        "toolkit: tf.distribute.MultiWorkerMirroredStrategy is toolkit's here, so that Keras 3's fit works; "
        "launch with --as_is for TensorFlow's own"
    )
    return MultiWorkerStrategy(*args, **kwargs)
