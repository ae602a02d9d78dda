"""Who takes part: a cluster and its tasks, TF_CONFIG, and where else a cluster is found.

Standard library only, and nothing here reads `os.environ`: the environment is an argument.

addresses   "host:port" taken apart, compared, and what can be wrong with one
problems    one thing wrong: where it is, what was found there, how to mend it
document    JSON text as an object, or where it stops being one
rules       everything that can be wrong with the jobs of a cluster
spec        Task and Cluster, which become TF_CONFIG
proxies     web proxies in the way of the tasks
exposure    addresses that the whole internet may reach
check       everything wrong with a TF_CONFIG, in one go
membership  a cluster, this process's task in it, and who said so
sources     where a cluster is found when there is no TF_CONFIG: Slurm, Open MPI, Kubernetes
discovery   the first of all these that applies
program     what a task runs, to be compared
calls       sockets with which tasks call one another
rendezvous  waiting for the other tasks, before TensorFlow does
"""

from toolkit.cluster.addresses import split
from toolkit.cluster.check import Checked, check, parse
from toolkit.cluster.discovery import discover, read, require
from toolkit.cluster.exposure import is_public, refuse_public
from toolkit.cluster.membership import Membership
from toolkit.cluster.problems import Problem
from toolkit.cluster.program import describe
from toolkit.cluster.proxies import check_proxies, without_proxies
from toolkit.cluster.rendezvous import meet
from toolkit.cluster.spec import Cluster, Task

__all__ = [
    "Checked",
    "Cluster",
    "Membership",
    "Problem",
    "Task",
    "check",
    "check_proxies",
    "describe",
    "discover",
    "is_public",
    "meet",
    "parse",
    "read",
    "refuse_public",
    "require",
    "split",
    "without_proxies",
]
