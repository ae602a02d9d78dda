"""The fields of a JobSet and a TFJob that are their own, as their types declare them, for jsonschema.

JobSet: api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset. TFJob: tensorflow_types.go, common_types.go and
tensorflow_validation.go in pkg/apis/kubeflow.org/v1 of kubeflow/training-operator. The pod and job templates that they
hold are Kubernetes's, and checked by its schemas.
"""


def only(required=(), **properties):
    """An object with these fields and no other: the API server would drop a misspelt one without a word."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_ANY = {"type": "object"}
_TEXT = {"type": "string"}
_YES = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TEXTS = {"type": "array", "items": _TEXT}

JOBSET = only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_ANY,
    spec=only(
        ("replicatedJobs",),
        replicatedJobs={
            "type": "array",
            "items": only(
                ("name", "template"),
                name=_TEXT,
                groupName=_TEXT,
                replicas=_COUNT,
                template=only(metadata=_ANY, spec=_ANY),
            ),
        },
        network=only(enableDNSHostnames=_YES, subdomain=_TEXT, publishNotReadyAddresses=_YES),
        successPolicy=only(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_TEXTS),
        failurePolicy=only(
            maxRestarts=_COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={
                "type": "array",
                "items": only(
                    ("name", "action"),
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                    onJobFailureReasons={**_TEXTS, "uniqueItems": True},
                    targetReplicatedJobs=_TEXTS,
                ),
            },
        ),
        suspend=_YES,
        ttlSecondsAfterFinished=_COUNT,
    ),
)

_REPLICAS = only(
    ("template",),
    replicas=_COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_ANY,
)

TFJOB = only(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "TFJob"},
    metadata=_ANY,
    spec=only(
        ("tfReplicaSpecs",),
        runPolicy=only(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            ttlSecondsAfterFinished=_COUNT,
            activeDeadlineSeconds=_COUNT,
            backoffLimit=_COUNT,
        ),
        successPolicy={"enum": ["", "AllWorkers"]},
        enableDynamicWorker=_YES,
        tfReplicaSpecs=only(Chief=_REPLICAS, Master=_REPLICAS, Worker=_REPLICAS, PS=_REPLICAS, Evaluator=_REPLICAS),
    ),
)

SCHEMAS = {"JobSet": JOBSET, "TFJob": TFJOB}
