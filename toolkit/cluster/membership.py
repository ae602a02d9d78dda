"""A cluster, this process's task in it, and who said so."""

import dataclasses

from toolkit.cluster.spec import Cluster, Task

__all__ = ["Membership"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """What a process was given.

    Args:
        cluster: All tasks.
        task: This process. In the cluster, save for an evaluator:0 that evaluates it from outside.
        source: Who said so, in words: "TF_CONFIG", "tf_configs/two_hosts.json", "Slurm step 12.0".
    """

    cluster: Cluster
    task: Task
    source: str
