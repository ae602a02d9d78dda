"""A cluster and its tasks, TF_CONFIG, and the other places where a cluster is described.

Come here to read, check or write a cluster, to teach the toolkit another launcher's environment, or for how tasks find
one another before they train. Standard library only; the environment is an argument of what reads it.

addresses   "host:port" taken apart, compared, and what can be wrong with one
tf_config   Task and Cluster, which become TF_CONFIG, and everything wrong with one, in one go
discovery   which cluster this process belongs to: by a file, TF_CONFIG, Slurm, Open MPI or Kubernetes
rendezvous  reaching the other tasks, past web proxies; waiting for them before TensorFlow does, and comparing programs
"""

from toolkit.cluster.addresses import split
from toolkit.cluster.discovery import discover, load, require
from toolkit.cluster.rendezvous import (
    describe_program,
    is_public,
    reach_directly,
    refuse_public,
    wait_for_tasks,
    without_proxies,
)
from toolkit.cluster.tf_config import Checked, Cluster, Membership, Problem, Task, check, numbered, parse

__all__ = [
    "Checked",
    "Cluster",
    "Membership",
    "Problem",
    "Task",
    "check",
    "describe_program",
    "discover",
    "is_public",
    "load",
    "numbered",
    "parse",
    "reach_directly",
    "refuse_public",
    "require",
    "split",
    "wait_for_tasks",
    "without_proxies",
]
