"""A chief, workers and ps that are one process: no process more to start, and every mode in turn."""

import socket

import tensorflow as tf

import toolkit
from toolkit.cluster import Cluster
from toolkit.strategies.parameter_servers.strategy import ParameterServerStrategy

MODES = {"rounds": {"synchronous": True}, "in_turn": {"max_staleness": 0}, "free": {}}


def served(mode, *, workers=2, ps=1):
    """The strategy of a chief. `as_if` makes it that of another mode, for the models that come after."""
    held = [socket.socket() for _ in range(1 + workers + ps)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
    # Servers of one process share its threads: with two cores, two of them wait for each other.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4 * (workers + ps))
    served.kept = [
        tf.distribute.Server(tf.train.ClusterSpec(jobs), job_name=job, task_index=index, config=config)
        for job in ("worker", "ps")
        for index in range(len(jobs[job]))
    ]
    return ParameterServerStrategy(Cluster(jobs), toolkit.strategies.ParameterServerOptions(**MODES[mode]))


def as_if(strategy, mode):
    """Makes a strategy that of another mode; it was created for rounds, which change more of Keras than others."""
    strategy.options = toolkit.strategies.ParameterServerOptions(**MODES[mode])
    return strategy
