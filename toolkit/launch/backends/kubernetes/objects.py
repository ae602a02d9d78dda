"""An Indexed Job, a JobSet or a TFJob, with a headless service and a network policy.

What failed is started again as its kind has it: an Indexed Job replaces a failed pod, and the others, which fail with
it, too; a JobSet restarts all jobs together, up to max_restarts; a TFJob starts a pod again for exit codes from 128 on.
Exit code 2 says that what was asked can't be done: an Indexed Job and a JobSet give up then.
"""

from typing import Any

from toolkit.errors import RequestError
from toolkit.launch.backends.kubernetes.pods import CONTAINER, template
from toolkit.launch.backends.kubernetes.spec import ManifestSpec

__all__ = ["manifest"]


def manifest(wanted: ManifestSpec) -> list[dict[str, Any]]:
    """Returns the objects to create, in order."""
    makers = {"job": _indexed_job, "jobset": _jobset, "tfjob": _tfjob}
    return [*_service(wanted), _policy(wanted), makers[wanted.kind](wanted)]


def _metadata(wanted: ManifestSpec) -> dict[str, Any]:
    where = {"namespace": wanted.namespace} if wanted.namespace else {}
    return {"name": wanted.name, **where, "labels": _labels(wanted)}


def _labels(wanted: ManifestSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": wanted.name}


def _service(wanted: ManifestSpec) -> list[dict[str, Any]]:
    """Returns the service that gives pods their names; a JobSet and a TFJob have their own."""
    if wanted.kind != "job":
        return []
    spec = {
        "clusterIP": "None",
        "selector": _labels(wanted),
        # Tasks look for one another before any of them is ready.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "grpc", "port": wanted.port}],
    }
    return [{"apiVersion": "v1", "kind": "Service", "metadata": _metadata(wanted), "spec": spec}]


def _policy(wanted: ManifestSpec) -> dict[str, Any]:
    """Returns the policy that lets only the job's pods reach them: TensorFlow's servers take orders from anybody."""
    own = {"podSelector": {"matchLabels": _labels(wanted)}}
    spec = {"podSelector": {"matchLabels": _labels(wanted)}, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(wanted), "spec": spec}


def _job_spec(wanted: ManifestSpec, job: str | None, number: int, *, backoff: int) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": number,
        "parallelism": number,
        "backoffLimit": backoff,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": [RequestError.exit_code],
                    },
                },
                # A node that is drained or preempted is no fault of the job's.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template(wanted, job),
    }


def _indexed_job(wanted: ManifestSpec) -> dict[str, Any]:
    tasks = sum(number for _, number in wanted.jobs)
    # A task that fails takes the others with it: each restart of the job costs as many failures as there are pods.
    spec = _job_spec(wanted, None, tasks, backoff=wanted.max_restarts * tasks)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(wanted), "spec": spec}


def _jobset(wanted: ManifestSpec) -> dict[str, Any]:
    jobs = [
        {"name": job, "replicas": 1, "template": {"spec": _job_spec(wanted, job, number, backoff=0)}}
        for job, number in wanted.jobs
    ]
    leads = "chief" if any(job == "chief" for job, _ in wanted.jobs) else "worker"
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": wanted.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": wanted.max_restarts,
            # What the pods' own policy has given up for good, exit code 2, isn't restarted.
            "rules": [{"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [leads]},
        "replicatedJobs": jobs,
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(wanted), "spec": spec}


def _tfjob(wanted: ManifestSpec) -> dict[str, Any]:
    names = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
    replicas = {
        names[job]: {"replicas": number, "restartPolicy": "ExitCode", "template": template(wanted, job)}
        for job, number in wanted.jobs
    }
    spec = {
        "runPolicy": {"backoffLimit": wanted.max_restarts, "cleanPodPolicy": "Running"},
        "tfReplicaSpecs": replicas,
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": _metadata(wanted), "spec": spec}
