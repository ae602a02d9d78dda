"""A pod: its container, resources, volumes, and what it may not do."""

import json
from typing import Any

from toolkit.cluster.sources.kubernetes import CLUSTER, TASK
from toolkit.errors import LaunchError
from toolkit.launch.backends.kubernetes.names import cluster
from toolkit.launch.backends.kubernetes.request import Request
from toolkit.support import status

__all__ = ["GRACE", "template"]

CONTAINER = "tensorflow"  # The name that Kubeflow's TFJob looks for.
GRACE = 120  # Seconds between SIGTERM and SIGKILL: a step, a checkpoint.
_LONGEST = (128 << 10) - 100  # Bytes of a variable with its name: Linux's MAX_ARG_STRLEN.
_TRAINS = ("chief", "worker")


def template(request: Request, job: str | None) -> dict[str, Any]:
    """Returns a pod template.

    Args:
        request: The job.
        job: Whose tasks these pods are; None where pods of all jobs are numbered through.
    """
    names = {"app.kubernetes.io/name": request.name, "app.kubernetes.io/managed-by": "toolkit"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never" if request.kind != "tfjob" else None,
        "subdomain": request.name if request.kind == "job" else None,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Or each service of the namespace becomes variables of ours.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": request.user,
            "runAsGroup": request.user,
            "fsGroup": request.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, job)],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "temporary", "emptyDir": {}},
            *(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}}
                for number, volume in enumerate(request.volumes)
            ),
        ],
    }
    return {"metadata": {"labels": names}, "spec": {key: value for key, value in spec.items() if value is not None}}


def _container(request: Request, job: str | None) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": request.image,
        "command": [_literal(part) for part in (request.python, *request.command)],
        "env": [{"name": name, "value": _literal(value)} for name, value in _environment(request, job).items()],
        "ports": [{"name": "tfjob-port", "containerPort": request.port}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
            *({"name": f"volume-{number}", "mountPath": volume.path} for number, volume in enumerate(request.volumes)),
        ],
    }
    resources = _resources(request, job)
    return {**container, "resources": resources} if resources else container


def _literal(text: str) -> str:
    """Kubernetes puts a variable's value in the place of $(NAME), and one dollar in that of two."""
    return text.replace("$", "$$")


def _environment(request: Request, job: str | None) -> dict[str, str]:
    found = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", status.RESUME: "1"}
    if request.kind != "tfjob":  # Its operator sets TF_CONFIG.
        found[CLUSTER] = _described(request)
        if job is not None:
            found[TASK] = job
    return {**found, **dict(request.environment)}


def _described(request: Request) -> str:
    text = json.dumps(cluster(request).as_dict(), separators=(",", ":"))
    if len(text) > _LONGEST:
        raise LaunchError(
            asked=f"{sum(number for _, number in request.jobs):,} tasks are to know one another",
            found=f"{CLUSTER} would hold {len(text):,} letters, and Linux gives a program at most {_LONGEST:,}",
            remedy="Ask for fewer tasks, or give the job a shorter name",
        )
    return text


def _resources(request: Request, job: str | None) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if request.memory:
        limits["memory"] = request.memory
    if request.gpus and (job is None or job in _TRAINS):
        limits["nvidia.com/gpu"] = request.gpus
    requests = {name: value for name, value in (("cpu", request.cpu), ("memory", request.memory)) if value}
    return {name: value for name, value in (("limits", limits), ("requests", requests)) if value}
