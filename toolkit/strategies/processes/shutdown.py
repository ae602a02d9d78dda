"""The shutdown barrier: processes that train together end together.

A worker that exits while another still works is reported there as crashed, although all is done
(tensorflow#58434; seen in 2 of 28 runs). So each waits at its exit until all have come to theirs.
"""

import atexit
import logging
import os
import sys

import tensorflow as tf

from toolkit.strategies.processes import agreement
from toolkit.support import status

__all__ = ["wait_at_exit"]

_LOG = logging.getLogger(__name__)
# The others may be saving or evaluating, or they may be in a step that needs this process.
_SECONDS = 60.0


def wait_at_exit(strategy: tf.distribute.Strategy) -> None:
    """Makes this process wait for the others when it exits, unless it fails."""
    if agreement.processes(strategy) > 1:
        atexit.register(_wait, strategy, os.getpid())


def _wait(strategy: tf.distribute.Strategy, pid: int) -> None:
    if os.getpid() != pid:  # A fork of the worker also runs functions registered for its exit, but takes no part.
        return
    if status.failed() or hasattr(sys, "last_value"):  # Python sets it when it has printed a traceback.
        return
    status.report(state="ending")
    try:
        agreement.barrier(strategy, seconds=_SECONDS)
    except tf.errors.OpError as error:
        _LOG.warning("Another worker ended before all workers had finished (%s)", type(error).__name__)
