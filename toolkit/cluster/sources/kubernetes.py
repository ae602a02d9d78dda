"""A pod's membership, from the environment that `toolkit launch --on=kubernetes` sets.

TOOLKIT_CLUSTER holds the whole cluster as JSON, and TOOLKIT_TASK the pod's job. Kubernetes itself numbers the pods of
an Indexed Job in JOB_COMPLETION_INDEX, and a headless service makes their names known
(https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/). Without TOOLKIT_TASK all tasks of the cluster
are pods of one Job, numbered through: chief, workers, ps, evaluator.
"""

import json
from collections.abc import Mapping

from toolkit.cluster.check import parse
from toolkit.cluster.sources import ranks
from toolkit.cluster.spec import Membership
from toolkit.errors import ClusterError

__all__ = ["CLUSTER", "TASK", "membership"]

CLUSTER, TASK = "TOOLKIT_CLUSTER", "TOOLKIT_TASK"
_INDEX = "JOB_COMPLETION_INDEX"


def membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads a pod's variables.

    Returns:
        None outside of an Indexed Job that was made for this toolkit, and in a cluster of one task.

    Raises:
        ClusterError: The manifest says only part of it, or the Job has more pods than the cluster has tasks.
    """
    if not environ.get(CLUSTER) or _INDEX not in environ:
        return None
    cluster = parse(_text(environ[CLUSTER]), source=CLUSTER, task_required=False).sound
    index = ranks.whole(environ, _INDEX, launcher="Kubernetes")
    job = environ.get(TASK)
    tasks = cluster.tasks if not job else tuple(task for task in cluster.tasks if task.job == job)
    if index >= len(tasks):
        raise ClusterError(
            asked=f"{CLUSTER} describes {len(tasks)} tasks{f' of job {job}' if job else ''}",
            found=f"this pod's {_INDEX} is {index}",
            remedy="Let completions and parallelism be the number of tasks, as `toolkit launch --on=kubernetes` does",
        )
    if len(cluster.tasks) < 2:
        return None
    return Membership(
        cluster=cluster, task=tasks[index], source=f"Kubernetes, pod {index}{f' of {job}' if job else ''}"
    )


def _text(cluster: str) -> str:
    try:
        return json.dumps({"cluster": json.loads(cluster)})
    except (ValueError, RecursionError):
        raise ClusterError(
            asked=f"{CLUSTER} describes a cluster as JSON",
            found=f"it isn't JSON: {cluster[:60]!r}",
            remedy="Use the value that `toolkit launch --on=kubernetes` writes",
        ) from None
