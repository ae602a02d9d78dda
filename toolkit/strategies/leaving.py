"""The end of a process that others train with.

A worker that exits while another still works is reported there as crashed, although all is done
(tensorflow#58434; seen in 2 of 28 runs). So each waits at its exit until all have come to theirs.
"""

import atexit
import logging
import sys

import tensorflow as tf

from toolkit import status
from toolkit.strategies import agreement

__all__ = ["leave_together"]

_LOG = logging.getLogger(__name__)
_SECONDS = 15.0  # The others may be saving a model, or may never come because they failed.


def leave_together(strategy: tf.distribute.Strategy) -> None:
    """Makes this process wait for the others when it exits, unless it fails."""
    if agreement.processes(strategy) > 1:
        atexit.register(_wait, strategy)


def _wait(strategy: tf.distribute.Strategy) -> None:
    failed = status.failed() or hasattr(sys, "last_value")  # Python leaves it when it has printed a traceback.
    if failed:
        return
    status.report(state="ending")
    try:
        agreement.meet(strategy, seconds=_SECONDS)
    except tf.errors.OpError as error:
        _LOG.warning("The other workers didn't come to their end within %g s (%s)", _SECONDS, type(error).__name__)
