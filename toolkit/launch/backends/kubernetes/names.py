"""The names of pods, and the cluster that they make."""

from toolkit.cluster import Cluster
from toolkit.launch.backends.kubernetes.request import Request

__all__ = ["cluster"]


def cluster(request: Request) -> Cluster:
    """Returns who takes part, at the names that pods have behind the headless service of the job's name.

    An Indexed Job calls its pods NAME-INDEX; a JobSet NAME-JOB-0-INDEX, with a replicated job for each of ours.
    """
    jobs: dict[str, list[str]] = {}
    index = 0
    for job, number in request.jobs:
        jobs[job] = []
        for own in range(number):
            host = f"{request.name}-{index}" if request.kind == "job" else f"{request.name}-{job}-0-{own}"
            jobs[job].append(f"{host}.{request.name}:{request.port}")
            index += 1
    return Cluster(jobs)
