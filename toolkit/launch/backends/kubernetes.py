"""Manifests for Kubernetes: an Indexed Job, a JobSet or a TFJob, with a headless service and a network policy.

What failed is started again as its kind has it: an Indexed Job replaces a failed pod, and the others, which fail with
it, too; a JobSet restarts all jobs together, up to max_restarts; a TFJob starts a pod again for exit codes from 128 on.
Exit code 2 says that what was asked can't be done: an Indexed Job and a JobSet give up then.

Names and quantities follow https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import json
import pathlib
import re
from typing import Any

from toolkit.cluster import Cluster, numbered
from toolkit.cluster.sources.kubernetes import CLUSTER, TASK
from toolkit.errors import LaunchError, RequestError
from toolkit.launch.job.checks import require
from toolkit.launch.job.spec import JobSpec
from toolkit.support import redaction, status

__all__ = ["GRACE", "manifest", "manifest_text", "notes"]

CONTAINER = "tensorflow"  # The name that Kubeflow's TFJob looks for.
GRACE = 120  # Seconds between SIGTERM and SIGKILL: a step, a checkpoint.
_LONGEST_VARIABLE = (128 << 10) - 100  # Bytes of a variable with its name: Linux's MAX_ARG_STRLEN.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, which services ask for.
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LONGEST = 63
_TRAINS = ("chief", "worker")


def manifest_text(spec: JobSpec) -> str:
    """Returns the objects to create as YAML; raises a LaunchError where a value is none that Kubernetes takes."""
    import yaml

    return yaml.safe_dump_all(manifest(spec), sort_keys=False)


def notes(spec: JobSpec) -> list[str]:
    """Returns what the user should know of a manifest, sentence by sentence."""
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
    """Returns the objects to create, in order; raises a LaunchError where a value is none that Kubernetes takes."""
    _check(spec)
    made = {"job": _indexed_job, "jobset": _jobset, "tfjob": _tfjob}[spec.kind](spec)
    return [*_service(spec), _policy(spec), _merged(made, _patch(spec))]


def _check(spec: JobSpec) -> None:
    require(bool(spec.counts), "a job on Kubernetes", "the number of tasks is missing", "Give --workers=2")
    require(spec.image is not None, "a job on Kubernetes", "the container image is missing", "Give --image=IMAGE")
    tasks = sum(number for _, number in spec.counts)
    longest = _LONGEST - 1 - len(str(tasks)) - (len("-evaluator-0") if spec.kind != "job" else 0)
    image = spec.image or ""
    mounts = [path for _, path in _mounts(spec)]
    said = f"Use up to {longest} of a-z, 0-9 and -, a letter first: pods' names are made of it"
    named = bool(image) and not re.search(r"\s|^-", image)
    for flag, value, fits, remedy in (
        ("name", spec.name, _is_name(spec.name) and len(spec.name) <= longest, said),
        ("namespace", spec.namespace, spec.namespace is None or _is_name(spec.namespace), "Use a-z, 0-9 and -"),
        ("image", image, named, "Name it as `docker pull` does, best with a tag or digest"),
        ("memory", spec.memory, spec.memory is None or _QUANTITY.fullmatch(spec.memory), "Write such as 8Gi"),
        ("volume", ", ".join(mounts), len(set(mounts)) == len(mounts), "Mount each volume at a place of its own"),
    ):
        require(bool(fits), f"--{flag}={value!s:.80}", "Kubernetes doesn't take that", remedy)
    for text in (*spec.command, *spec.env, *spec.volume, spec.python or ""):
        # Python's texts hold half a surrogate pair for each byte that isn't UTF-8.
        fits = not any("\ud800" <= letter <= "\udfff" for letter in text)
        require(fits, f"the text {text[:60]!r}", "Kubernetes doesn't take that", "Give UTF-8 text")


def _is_name(text: str) -> bool:
    return bool(_LABEL.fullmatch(text)) and len(text) <= _LONGEST


def _mounts(spec: JobSpec) -> list[tuple[str, str]]:
    """Returns the claim and the path of each volume."""
    found = []
    for text in spec.volume:
        claim, colon, path = text.partition(":")
        fits = bool(colon and _is_name(claim) and path.startswith("/"))
        require(fits, f"--volume={text[:80]}", "Kubernetes doesn't take that", "Write it as CLAIM:/PATH")
        found.append((claim, path))
    return found


def _patch(spec: JobSpec) -> Any:
    """Returns what the user's file has to say of the job object."""
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
    """Lays a mapping over another, as RFC 7386 has it: null removes, and lists are replaced."""
    if not isinstance(made, dict) or not isinstance(patch, dict):
        return patch
    merged = {**made, **{key: _merged(made.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def _labels(spec: JobSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": spec.name}


def _metadata(spec: JobSpec) -> dict[str, Any]:
    return {"name": spec.name, **({"namespace": spec.namespace} if spec.namespace else {}), "labels": _labels(spec)}


def _service(spec: JobSpec) -> list[dict[str, Any]]:
    """Returns the service that gives pods their names; a JobSet and a TFJob have their own."""
    if spec.kind != "job":
        return []
    made = {
        "clusterIP": "None",
        "selector": _labels(spec),
        # Tasks look for one another before any of them is ready.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "grpc", "port": spec.port}],
    }
    return [{"apiVersion": "v1", "kind": "Service", "metadata": _metadata(spec), "spec": made}]


def _policy(spec: JobSpec) -> dict[str, Any]:
    """Returns the policy that lets only the job's pods reach them: TensorFlow's servers take orders from anybody."""
    own = {"podSelector": {"matchLabels": _labels(spec)}}
    made = {"podSelector": {"matchLabels": _labels(spec)}, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(spec), "spec": made}


def _job_spec(spec: JobSpec, job: str | None, number: int, *, backoff: int) -> dict[str, Any]:
    refused = {"containerName": CONTAINER, "operator": "In", "values": [RequestError.exit_code]}
    # A node that is drained or preempted is no fault of the job's.
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completionMode": "Indexed",
        "completions": number,
        "parallelism": number,
        "backoffLimit": backoff,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": refused}, {"action": "Ignore", "onPodConditions": drained}]
        },
        "template": _template(spec, job),
    }


def _indexed_job(spec: JobSpec) -> dict[str, Any]:
    tasks = sum(number for _, number in spec.counts)
    # A task that fails takes the others with it: each restart of the job costs as many failures as there are pods.
    made = _job_spec(spec, None, tasks, backoff=spec.max_restarts * tasks)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(spec), "spec": made}


def _jobset(spec: JobSpec) -> dict[str, Any]:
    jobs = [
        {"name": job, "replicas": 1, "template": {"spec": _job_spec(spec, job, number, backoff=0)}}
        for job, number in spec.counts
    ]
    leads = "chief" if any(job == "chief" for job, _ in spec.counts) else "worker"
    made = {
        "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": spec.max_restarts,
            # What the pods' own policy has given up for good, exit code 2, isn't restarted.
            "rules": [{"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [leads]},
        "replicatedJobs": jobs,
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(spec), "spec": made}


def _tfjob(spec: JobSpec) -> dict[str, Any]:
    names = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
    replicas = {
        names[job]: {"replicas": number, "restartPolicy": "ExitCode", "template": _template(spec, job)}
        for job, number in spec.counts
    }
    policy = {"backoffLimit": spec.max_restarts, "cleanPodPolicy": "Running"}
    made = {"runPolicy": policy, "tfReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": _metadata(spec), "spec": made}


def _template(spec: JobSpec, job: str | None) -> dict[str, Any]:
    """Returns a pod template.

    Args:
        spec: The job.
        job: The job whose tasks these pods are; None where pods of all jobs are numbered through.
    """
    names = {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "toolkit"}
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(_mounts(spec))
    ]
    temporary: dict[str, Any] = {"name": "temporary", "emptyDir": {}}
    rights = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    made: dict[str, Any] = {
        "restartPolicy": "Never" if spec.kind != "tfjob" else None,
        "subdomain": spec.name if spec.kind == "job" else None,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Or each service of the namespace becomes variables of ours.
        "securityContext": {**rights, **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), spec.user)},
        "containers": [_container(spec, job)],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, temporary, *claims],
    }
    return {"metadata": {"labels": names}, "spec": {key: value for key, value in made.items() if value is not None}}


def _container(spec: JobSpec, job: str | None) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image,
        "command": [_literal(argument) for argument in (spec.python or "python", *spec.command)],
        "env": [{"name": name, "value": _literal(value)} for name, value in _environment(spec, job).items()],
        "ports": [{"name": "tfjob-port", "containerPort": spec.port}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
            *({"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(_mounts(spec))),
        ],
    }
    resources = _resources(spec, job)
    return {**container, "resources": resources} if resources else container


def _literal(text: str) -> str:
    """Returns how to write a text: Kubernetes replaces $(NAME) by a variable's value, and $$ by one dollar."""
    return text.replace("$", "$$")


def _environment(spec: JobSpec, job: str | None) -> dict[str, str]:
    times = {status.START_TIMEOUT: spec.start_timeout, status.HEARTBEAT_TIMEOUT: spec.heartbeat_timeout}
    found = {name: f"{seconds:g}" for name, seconds in times.items()}
    found |= {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", status.RESUME: "1"}
    if spec.kind != "tfjob":  # Its operator sets TF_CONFIG.
        found[CLUSTER] = _described(spec)
        if job is not None:
            found[TASK] = job
    return {**found, **spec.environment}


def _described(spec: JobSpec) -> str:
    """Returns who takes part, at the names that pods have behind the headless service of the job's name.

    An Indexed Job calls its pods NAME-INDEX; a JobSet NAME-JOB-0-INDEX, with a replicated job for each of ours.
    """
    tasks = numbered(spec.counts)
    pods = [str(i) if spec.kind == "job" else f"{task.job}-0-{task.index}" for i, task in enumerate(tasks)]
    addresses = [f"{spec.name}-{pod}.{spec.name}:{spec.port}" for pod in pods]
    cluster = Cluster.at(dict(zip(tasks, addresses, strict=True)))
    text = json.dumps(cluster.as_dict(), separators=(",", ":"))
    require(
        len(text) <= _LONGEST_VARIABLE,
        f"{sum(number for _, number in spec.counts):,} tasks are to know one another",
        f"{CLUSTER} would have {len(text):,} characters, and Linux allows at most {_LONGEST_VARIABLE:,}",
        "Ask for fewer tasks, or give the job a shorter name",
    )
    return text


def _resources(spec: JobSpec, job: str | None) -> dict[str, Any]:
    gpus = spec.gpus_per_task if job is None or job in _TRAINS else 0
    limits = {"memory": spec.memory, "nvidia.com/gpu": gpus}
    found: dict[str, dict[str, Any]] = {
        "limits": limits,
        "requests": {"cpu": spec.cpus_per_task, "memory": spec.memory},
    }
    given = {name: {key: value for key, value in each.items() if value} for name, each in found.items()}
    return {name: each for name, each in given.items() if each}
