"""Writes a manifest for Kubernetes: an Indexed Job, with a headless service and a network policy.

Kubernetes replaces a pod that failed, and the others, which fail with it, too. Exit code 2 says that what was asked
can't be done: it gives up then.

Names and quantities follow https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import json
import pathlib
import re
from typing import Any

from toolkit.cluster import Cluster, numbered
from toolkit.cluster.discovery import CLUSTER
from toolkit.errors import LaunchError, RequestError
from toolkit.launch.checks import require
from toolkit.launch.spec import JobSpec
from toolkit.support import redaction, status

CONTAINER = "tensorflow"
GRACE = 120  # Seconds between SIGTERM and SIGKILL, enough for a step and a checkpoint.
_LONGEST_VARIABLE = (128 << 10) - 100  # The most bytes of a variable with its name: Linux's MAX_ARG_STRLEN.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, which names of services follow.
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LONGEST = 63


def manifest_text(spec: JobSpec) -> str:
    """Returns the objects to create as YAML; raises a LaunchError for a value that Kubernetes refuses."""
    import yaml

    return yaml.safe_dump_all(manifest(spec), sort_keys=False)


def notes(spec: JobSpec) -> list[str]:
    """Returns notes about a manifest for its user, as sentences."""
    found = [
        f"note: anyone who can read the manifest can read {name}; use a Kubernetes Secret instead."
        for name in spec.environment
        if redaction.is_secret(name)
    ]
    if not spec.volume:
        found.append("note: without --volume, checkpoints are lost with their pod.")
    elif not any(part.startswith("--run_dir") for part in spec.command):
        found.append(f"note: give --run_dir={_mounts(spec)[0][1]}/{spec.name} to keep checkpoints.")
    return found


def manifest(spec: JobSpec) -> list[dict[str, Any]]:
    """Returns the objects to create, in order; raises a LaunchError for a value that Kubernetes refuses."""
    _check(spec)
    return [_service(spec), _policy(spec), _merged(_job(spec), _patch(spec))]


def _check(spec: JobSpec) -> None:
    require(bool(spec.counts), "a job on Kubernetes", "the number of tasks is missing", "Give --workers=2")
    require(spec.image is not None, "a job on Kubernetes", "the container image is missing", "Give --image=IMAGE")
    tasks = sum(number for _, number in spec.counts)
    longest = _LONGEST - 1 - len(str(tasks))
    image = spec.image or ""
    mounts = [path for _, path in _mounts(spec)]
    short = f"Use up to {longest} of a-z, 0-9 and -, a letter first: pods' names are made of it"
    named = bool(image) and not re.search(r"\s|^-", image)
    for flag, value, fits, remedy in (
        ("name", spec.name, _is_name(spec.name) and len(spec.name) <= longest, short),
        ("namespace", spec.namespace, spec.namespace is None or _is_name(spec.namespace), "Use a-z, 0-9 and -"),
        ("image", image, named, "Name it as `docker pull` does, best with a tag or digest"),
        ("memory", spec.memory, spec.memory is None or _QUANTITY.fullmatch(spec.memory), "Write such as 8Gi"),
        ("volume", ", ".join(mounts), len(set(mounts)) == len(mounts), "Mount each volume at its own place"),
    ):
        require(bool(fits), f"--{flag}={value!s:.80}", "Kubernetes doesn't take that", remedy)
    for text in (*spec.command, *spec.env, *spec.volume, spec.python or ""):
        # Python has half a surrogate pair for each byte of a text that isn't UTF-8.
        fits = not any("\ud800" <= letter <= "\udfff" for letter in text)
        require(fits, f"the text {text[:60]!r}", "Kubernetes doesn't take that", "Give UTF-8 text")


def _is_name(text: str) -> bool:
    return bool(_LABEL.fullmatch(text)) and len(text) <= _LONGEST


def _mounts(spec: JobSpec) -> list[tuple[str, str]]:
    """Returns each volume's claim and path."""
    found = []
    for text in spec.volume:
        claim, colon, path = text.partition(":")
        fits = bool(colon and _is_name(claim) and path.startswith("/"))
        require(fits, f"--volume={text[:80]}", "Kubernetes doesn't take that", "Write it as CLAIM:/PATH")
        found.append((claim, path))
    return found


def _patch(spec: JobSpec) -> Any:
    """Returns the user's file of changes to the job object."""
    if spec.patch is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(pathlib.Path(spec.patch).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = str(getattr(error, "strerror", None) or error).replace("\n", " ")
        raise LaunchError(
            asked=f"--patch={spec.patch} is merged into the job object",
            found=f"it can't be used ({why})",
            remedy="Write YAML such as spec: {template: {spec: {nodeSelector: {gpu: a100}}}}",
        ) from error
    return found


def _merged(made: Any, patch: Any) -> Any:
    """Merges one mapping into another by RFC 7386: null removes a key, and lists are replaced."""
    if not isinstance(made, dict) or not isinstance(patch, dict):
        return patch
    merged = {**made, **{key: _merged(made.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _metadata(spec: JobSpec) -> dict[str, Any]:
    return {"name": spec.name, **({"namespace": spec.namespace} if spec.namespace else {}), "labels": _labels(spec)}


def _labels(spec: JobSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": spec.name}


def _service(spec: JobSpec) -> dict[str, Any]:
    """Returns the service that gives pods their names."""
    made = {
        "clusterIP": "None",
        "selector": _labels(spec),
        # Tasks look up each other's names before any of them is ready.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "grpc", "port": spec.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(spec), "spec": made}


def _policy(spec: JobSpec) -> dict[str, Any]:
    """Returns the policy by which only the job's pods reach its tasks: TensorFlow's servers ask for no password."""
    own = {"podSelector": {"matchLabels": _labels(spec)}}
    made = {"podSelector": {"matchLabels": _labels(spec)}, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(spec), "spec": made}


def _job(spec: JobSpec) -> dict[str, Any]:
    tasks, most = sum(number for _, number in spec.counts), spec.max_total_restarts
    refused = {"containerName": CONTAINER, "operator": "In", "values": [RequestError.exit_code]}
    # A drained or preempted node isn't the job's failure.
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    made = {
        "completionMode": "Indexed",
        "completions": tasks,
        "parallelism": tasks,
        # A failed task ends the others, so each restart of the job counts as one failure for each pod.
        # Kubernetes knows nothing of progress, so this limits all restarts.
        "backoffLimit": (spec.max_restarts if most is None else most) * tasks,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": refused}, {"action": "Ignore", "onPodConditions": drained}]
        },
        "template": _template(spec),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(spec), "spec": made}


def _template(spec: JobSpec) -> dict[str, Any]:
    mounts = list(enumerate(_mounts(spec)))
    volumes = [{"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": claim}} for n, (claim, _) in mounts]
    resources: dict[str, dict[str, Any]] = {
        "limits": {"memory": spec.memory, "nvidia.com/gpu": spec.gpus_per_task},
        "requests": {"cpu": spec.cpus_per_task, "memory": spec.memory},
    }
    given = {name: {key: value for key, value in each.items() if value} for name, each in resources.items()}
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "command": [_literal(argument) for argument in (spec.python or "python", *spec.command)],
        "env": [{"name": name, "value": _literal(value)} for name, value in _environment(spec).items()],
        "ports": [{"name": "grpc", "containerPort": spec.port}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
            *({"name": f"volume-{n}", "mountPath": path} for n, (_, path) in mounts),
        ],
        **({"resources": {name: each for name, each in given.items() if each}} if any(given.values()) else {}),
    }
    made = {
        "restartPolicy": "Never",
        "subdomain": spec.name,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Otherwise each service of the namespace becomes an environment variable.
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), spec.user),
        },
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "temporary", "emptyDir": {}},
            *volumes,
        ],
    }
    return {"metadata": {"labels": {**_labels(spec), "app.kubernetes.io/managed-by": "toolkit"}}, "spec": made}


def _literal(text: str) -> str:
    """Escapes a text: Kubernetes replaces $(NAME) by a variable's value, and $$ by one dollar."""
    return text.replace("$", "$$")


def _environment(spec: JobSpec) -> dict[str, str]:
    return {
        status.START_TIMEOUT: f"{spec.start_timeout:g}",
        status.HEARTBEAT_TIMEOUT: f"{spec.heartbeat_timeout:g}",
        status.GRACE: str(GRACE),
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        **status.HASH_SEED,
        status.RESUME: "1",
        CLUSTER: _described(spec),
        **spec.environment,
    }


def _described(spec: JobSpec) -> str:
    """Returns the cluster, at the names NAME-INDEX that pods have behind the job's headless service."""
    tasks = numbered(spec.counts)
    addresses = [f"{spec.name}-{index}.{spec.name}:{spec.port}" for index in range(len(tasks))]
    cluster = Cluster.at(dict(zip(tasks, addresses, strict=True)))
    text = json.dumps(cluster.as_dict(), separators=(",", ":"))
    require(
        len(text) <= _LONGEST_VARIABLE,
        f"{sum(number for _, number in spec.counts):,} tasks are to know one another",
        f"{CLUSTER} would have {len(text):,} characters, and Linux allows at most {_LONGEST_VARIABLE:,}",
        "Ask for fewer tasks, or give the job a shorter name",
    )
    return text
