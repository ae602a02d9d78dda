"""The membership of a pod in an Indexed Job.

Kubernetes numbers the pods in JOB_COMPLETION_INDEX and calls them JOB-INDEX; a headless service makes
these names known (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/). How many
there are, and the two names, no pod is told: the manifest sets TOOLKIT_WORKERS, TOOLKIT_JOB_NAME and
TOOLKIT_SERVICE.
"""

from collections.abc import Mapping

from toolkit.cluster import variables
from toolkit.cluster.membership import Membership
from toolkit.cluster.spec import Cluster, Task
from toolkit.errors import ClusterError

__all__ = ["membership"]

_PORT = 2222
_OURS = ("TOOLKIT_WORKERS", "TOOLKIT_SERVICE", "TOOLKIT_JOB_NAME")


def membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads an Indexed Job's variables: every pod is a worker.

    Returns:
        None outside an Indexed Job, in one whose manifest says nothing of workers, and for one worker.

    Raises:
        ClusterError: The manifest says only part of it, or has more completions than workers.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    if not any(environ.get(name) for name in _OURS):
        return None
    launcher = "the Job's manifest"
    workers = variables.whole(environ, "TOOLKIT_WORKERS", launcher=launcher)
    service = variables.text(environ, "TOOLKIT_SERVICE", launcher=launcher)
    job = variables.text(environ, "TOOLKIT_JOB_NAME", launcher=launcher)
    index = variables.whole(environ, "JOB_COMPLETION_INDEX", launcher="Kubernetes")
    if index >= workers or workers > 100_000:
        raise ClusterError(
            asked=f"TOOLKIT_WORKERS={workers} says how many pods train together",
            found=f"this pod's JOB_COMPLETION_INDEX is {index}",
            remedy="Let the manifest set TOOLKIT_WORKERS, completions and parallelism to the same number",
        )
    if workers < 2:
        return None
    addresses = [f"{job}-{number}.{service}:{_PORT}" for number in range(workers)]
    return Membership(
        cluster=Cluster({"worker": addresses}), task=Task("worker", index), source=f"Kubernetes job {job}"
    )
