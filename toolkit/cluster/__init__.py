"""A cluster and its tasks, TF_CONFIG, and the other places where a cluster is described.

Come here to read, check or write a cluster, to teach the toolkit another launcher's environment, or for how tasks find
one another before they train. Standard library only; the environment is an argument of what reads it.

addresses   "host:port" taken apart, compared, and what can be wrong with one
rules       everything that can be wrong with the jobs of a cluster: where it is, what was found, how to mend it
spec        Task and Cluster, which become TF_CONFIG, and what a process was given of them
network     web proxies in the way of the tasks, and addresses that the whole internet reaches
check       everything wrong with a TF_CONFIG, in one go
sources     where a cluster is found when there is no TF_CONFIG: Slurm, Open MPI, Kubernetes
discovery   which cluster this process belongs to, by the first of all these that applies
rendezvous  waiting for the other tasks, before TensorFlow does, and comparing what they run
"""

from toolkit.cluster.addresses import split
from toolkit.cluster.check import Checked, check, parse
from toolkit.cluster.discovery import discover, load, require
from toolkit.cluster.network import is_public, reach_directly, refuse_public, without_proxies
from toolkit.cluster.rendezvous import describe_program, wait_for_tasks
from toolkit.cluster.rules import Problem
from toolkit.cluster.spec import Cluster, Membership, Task, numbered

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
