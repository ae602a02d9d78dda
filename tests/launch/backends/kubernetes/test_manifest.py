"""Manifests: valid by Kubernetes's own schemas, understood by the pods that they make, and safe."""

import json

import kubernetes_validate
import pytest
import yaml

from toolkit.cli.main import main
from toolkit.cluster import discover
from toolkit.errors import LaunchError
from toolkit.launch import JobSpec
from toolkit.launch.backends import kubernetes

VERSIONS = ("1.31", "1.35")
RECIPE = ("-m", "recipes.cifar_parameter_server", "--run_dir=/runs/it's $(x)")
EVERY = {"chief": True, "workers": 3, "ps": 2, "evaluator": True}


def request(**changes):
    given = {"on": "kubernetes", "name": "cifar", "workers": 2, "image": "registry.test/x:1", "command": RECIPE}
    return JobSpec(**{**given, **changes})


def objects(**changes):
    return {each["kind"]: each for each in kubernetes.manifest(request(**changes))}


def template(made):
    return made["Job"]["spec"]["template"]


def check(each):
    for version in VERSIONS:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("jobs", [{}, EVERY], ids=["workers", "every job"])
def test_what_is_written_is_valid_by_the_published_schemas(jobs):
    volumes = ("runs:/runs", "data:/data")
    resources = {"gpus_per_task": 1, "cpus_per_task": "500m", "memory": "8Gi"}
    made = objects(volume=volumes, namespace="team", **resources, **jobs)
    assert set(made) == {"Service", "NetworkPolicy", "Job"}
    for each in made.values():
        assert each["metadata"]["namespace"] == "team"
        check(each)


def test_each_pod_finds_its_task_and_all_have_the_same_cluster():
    made = objects(**EVERY)
    (container,) = template(made)["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    seen = {}
    for index in range(made["Job"]["spec"]["completions"]):
        found = discover({**environ, "JOB_COMPLETION_INDEX": str(index)})
        assert found.cluster.address(found.task) == f"cifar-{index}.cifar:2222"
        seen[str(found.task)] = found.cluster
    assert sorted(seen) == ["chief:0", "evaluator:0", "ps:0", "ps:1", "worker:0", "worker:1", "worker:2"]
    assert len({json.dumps(cluster.as_dict()) for cluster in seen.values()}) == 1


def test_containers_may_do_little_and_only_their_own_reach_them():
    made = objects(gpus_per_task=2, **EVERY)
    spec = template(made)["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    wanted = made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= template(made)["metadata"]["labels"].items()
    (rule,) = made["NetworkPolicy"]["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": wanted}}]}


def test_what_cannot_be_done_is_not_tried_again():
    (give_up, drained) = objects()["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert (give_up["action"], give_up["onExitCodes"]["values"]) == ("FailJob", [2])
    assert drained["action"] == "Ignore"
    assert objects(max_restarts=2)["Job"]["spec"]["backoffLimit"] == 4


def test_the_command_prints_yaml_that_kubectl_takes(capsys):
    flags = [
        "--name=cifar",
        "--workers=2",
        "--image=registry.test/x:1",
        "--volume=runs:/runs",
        "--env=A=it's: {x}\n- y",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--on=kubernetes", *flags, "-m", "recipes.cifar_multi_worker", "--run_dir=/runs/a b"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err.strip()) == (0, "")
    made = list(yaml.safe_load_all(out))
    assert [each["kind"] for each in made] == ["Service", "NetworkPolicy", "Job"]
    (container,) = made[2]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "recipes.cifar_multi_worker", "--run_dir=/runs/a b"]
    assert {"name": "A", "value": "it's: {x}\n- y"} in container["env"]
    assert {"name": "PYTHONHASHSEED", "value": "0"} in container["env"]
    for each in made:
        check(each)


def test_lost_checkpoints_are_said_beforehand(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--on=kubernetes", "--name=a", "--workers=2", "--image=x", "-m", "m"])
    assert "checkpoints are lost with their pod" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["launch", "--on=kubernetes", "--name=a", "--workers=2", "--image=x", "--volume=runs:/runs", "-m", "m"])
    assert "give --run_dir=/runs/a" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Cifar"},
        {"name": "a" * 62},
        {"image": ""},
        {"image": "a b"},
        {"image": "--rm"},
        {"memory": "8 Gi"},
        {"namespace": "Team"},
        {"volume": ("runs",)},
        {"volume": ("runs:runs",)},
        {"volume": ("Runs:/runs",)},
        {"volume": (":/runs",)},
        {"volume": ("a:/runs", "b:/runs")},
        {"command": ("-m", "\udcff")},
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(changes):
    with pytest.raises(LaunchError, match="Kubernetes doesn't take that"):
        kubernetes.manifest(request(**changes))


@pytest.mark.parametrize("changes", [{"workers": None}, {"image": None}])
def test_what_is_missing_is_said(changes):
    with pytest.raises(LaunchError, match="a job on Kubernetes, but the"):
        kubernetes.manifest(request(**changes))


def test_a_patch_is_laid_over_the_job(tmp_path):
    (tmp_path / "patch.yaml").write_text(
        "metadata: {annotations: {team: vision}}\n"
        "spec: {template: {spec: {nodeSelector: {gpu: a100}, enableServiceLinks: null}}, ttlSecondsAfterFinished: 60}\n"
    )
    made = objects(patch=str(tmp_path / "patch.yaml"))["Job"]
    check(made)
    assert made["metadata"]["annotations"] == {"team": "vision"}
    assert made["spec"]["ttlSecondsAfterFinished"] == 60
    spec = made["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"gpu": "a100"}
    assert "enableServiceLinks" not in spec
    assert spec["restartPolicy"] == "Never"


@pytest.mark.parametrize("text", ["- a", "{", None])
def test_a_patch_that_is_none_is_said(tmp_path, text):
    if text is not None:
        (tmp_path / "patch.yaml").write_text(text)
    with pytest.raises(LaunchError, match="is merged into the job object, but it can't be used"):
        objects(patch=str(tmp_path / "patch.yaml"))
