"""How chief, workers and ps start: all wait for one another, then a worker or ps serves until the chief is done."""

import logging
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import tensorflow as tf

from toolkit.cluster import Cluster, Task, describe_program, reach_directly, wait_for_tasks
from toolkit.errors import StrategyError
from toolkit.strategies.parameter_servers.dispatch import answers
from toolkit.support import redaction, signals, status

__all__ = ["meet"]

_LOG = logging.getLogger(__name__)
_LOOK = 1.0  # Seconds between two checks of the chief.
_PATIENCE = 5.0  # Seconds that the chief may be out of reach.


def meet(cluster: Cluster, task: Task, start_timeout: float | None) -> None:
    """Waits for the others. In a worker or ps it then serves and doesn't return.

    Args:
        cluster: All tasks.
        task: Who this process is.
        start_timeout: Seconds; None for 300, or what the launcher says.
    """
    if start_timeout is None:
        start_timeout = status.start_timeout()
    reach_directly(cluster)
    others = [other for other in cluster.tasks if other.job in ("worker", "ps")]
    # What tasks tell one another isn't encrypted, and a message shows where they differ.
    arguments = redaction.masked_command(sys.argv[1:], os.environ)
    program = describe_program(
        getattr(sys.modules.get("__main__"), "__file__", None), arguments, job=status.attempt_id()
    )
    if task.job != "chief":
        wait_for_tasks(cluster, task, timeout=start_timeout, peers=[cluster.chief], program=program)
        _serve(cluster, task)
    wait_for_tasks(cluster, task, timeout=start_timeout, peers=others, program=program)
    _wait_for_servers(cluster, others)


def _wait_for_servers(cluster: Cluster, others: list) -> None:
    """Waits for TensorFlow's start in tasks that have reached the rendezvous."""
    until = time.monotonic() + 120
    while missing := [task for task in others if not answers(cluster, task)]:
        if time.monotonic() > until:
            raise StrategyError(
                asked="the chief waits for the TensorFlow servers of the workers and ps",
                found=f"after 120 s there is no answer from {', '.join(map(str, missing[:4]))}",
                remedy="See the end of their output",
            )
        time.sleep(0.05)


def _serve(cluster: Cluster, task: Task) -> NoReturn:
    """Serves, then ends the process: with 0 when the chief has ended, with 143 or 130 on a signal.

    TensorFlow's own `join` never returns, and lets no signal handler of Python's run.

    Args:
        cluster: All tasks.
        task: Who this process is: a worker or ps.
    """
    stop = threading.Event()
    received: list[int] = []

    def end(number: int, _: Any) -> None:
        received.append(number)
        stop.set()

    with signals.handle((signal.SIGINT, signal.SIGTERM), end):
        members = [other for other in cluster.tasks if other.job != "evaluator"]
        spec = tf.train.ClusterSpec(cluster.restricted_to(members).as_dict())
        server = tf.distribute.Server(
            spec, job_name=task.job, task_index=task.index, protocol="grpc", config=_config(task)
        )
        status.report(state="serving", strategy="parameter_server")
        _LOG.info("%s serves at %s until the chief ends", task, cluster.address(task))
        seen = time.monotonic()
        while not stop.wait(_LOOK):
            now = time.monotonic()
            if answers(cluster, cluster.chief):
                seen = now
            elif now - seen > _PATIENCE:
                _LOG.info("The chief has ended, and so does %s", task)
                break
        status.report(state="ending")
        del server
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + received[0] if received else 0)  # TensorFlow's server never ends by itself.


def _config(task: Task) -> Any:
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    if task.job == "ps":
        config.device_count["GPU"] = 0
    return config
