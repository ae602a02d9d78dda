"""A pod: its container, resources, volumes, what it may not do, and the cluster that pods make by their names."""

import json
from typing import Any

from toolkit.cluster import Cluster, numbered
from toolkit.cluster.sources.kubernetes import CLUSTER, TASK
from toolkit.errors import LaunchError
from toolkit.launch.backends.kubernetes.spec import ManifestSpec
from toolkit.support import status

__all__ = ["GRACE", "template"]

CONTAINER = "tensorflow"  # The name that Kubeflow's TFJob looks for.
GRACE = 120  # Seconds between SIGTERM and SIGKILL: a step, a checkpoint.
_LONGEST = (128 << 10) - 100  # Bytes of a variable with its name: Linux's MAX_ARG_STRLEN.
_TRAINS = ("chief", "worker")


def template(wanted: ManifestSpec, job: str | None) -> dict[str, Any]:
    """Returns a pod template.

    Args:
        wanted: The job.
        job: The job whose tasks these pods are; None where pods of all jobs are numbered through.
    """
    names = {"app.kubernetes.io/name": wanted.name, "app.kubernetes.io/managed-by": "toolkit"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never" if wanted.kind != "tfjob" else None,
        "subdomain": wanted.name if wanted.kind == "job" else None,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Or each service of the namespace becomes variables of ours.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": wanted.user,
            "runAsGroup": wanted.user,
            "fsGroup": wanted.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(wanted, job)],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "temporary", "emptyDir": {}},
            *(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}}
                for number, volume in enumerate(wanted.volumes)
            ),
        ],
    }
    return {"metadata": {"labels": names}, "spec": {key: value for key, value in spec.items() if value is not None}}


def _container(wanted: ManifestSpec, job: str | None) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": wanted.image,
        "command": [_literal(argument) for argument in (wanted.python, *wanted.command)],
        "env": [{"name": name, "value": _literal(value)} for name, value in _environment(wanted, job).items()],
        "ports": [{"name": "tfjob-port", "containerPort": wanted.port}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
            *({"name": f"volume-{number}", "mountPath": volume.path} for number, volume in enumerate(wanted.volumes)),
        ],
    }
    resources = _resources(wanted, job)
    return {**container, "resources": resources} if resources else container


def _literal(text: str) -> str:
    """Returns how to write a text: Kubernetes replaces $(NAME) by a variable's value, and $$ by one dollar."""
    return text.replace("$", "$$")


def _environment(wanted: ManifestSpec, job: str | None) -> dict[str, str]:
    found = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", status.RESUME: "1"}
    if wanted.kind != "tfjob":  # Its operator sets TF_CONFIG.
        found[CLUSTER] = _described(wanted)
        if job is not None:
            found[TASK] = job
    return {**found, **dict(wanted.environment)}


def _described(wanted: ManifestSpec) -> str:
    text = json.dumps(_cluster(wanted).as_dict(), separators=(",", ":"))
    if len(text) > _LONGEST:
        raise LaunchError(
            asked=f"{sum(number for _, number in wanted.jobs):,} tasks are to know one another",
            found=f"{CLUSTER} would hold {len(text):,} letters, and Linux gives a program at most {_LONGEST:,}",
            remedy="Ask for fewer tasks, or give the job a shorter name",
        )
    return text


def _cluster(wanted: ManifestSpec) -> Cluster:
    """Returns who takes part, at the names that pods have behind the headless service of the job's name.

    An Indexed Job calls its pods NAME-INDEX; a JobSet NAME-JOB-0-INDEX, with a replicated job for each of ours.
    """
    tasks = numbered(wanted.jobs)
    pods = [str(i) if wanted.kind == "job" else f"{task.job}-0-{task.index}" for i, task in enumerate(tasks)]
    addresses = [f"{wanted.name}-{pod}.{wanted.name}:{wanted.port}" for pod in pods]
    return Cluster.at(dict(zip(tasks, addresses, strict=True)))


def _resources(wanted: ManifestSpec, job: str | None) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if wanted.memory:
        limits["memory"] = wanted.memory
    if wanted.gpus and (job is None or job in _TRAINS):
        limits["nvidia.com/gpu"] = wanted.gpus
    requests = {name: value for name, value in (("cpu", wanted.cpu), ("memory", wanted.memory)) if value}
    return {name: value for name, value in (("limits", limits), ("requests", requests)) if value}
