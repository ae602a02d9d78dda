import io
import json
import pathlib
import subprocess

import pytest

from toolkit.cli.main import main
from toolkit.cluster import Cluster, Task, parse

SAMPLES = pathlib.Path(__file__).parents[2] / "tf_configs"
TWO = Cluster({"worker": ["a:1", "b:1"]})


@pytest.fixture
def tf_config(capsys):
    """Runs `toolkit tf-config` in this process; returns its exit code and what it wrote."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["tf-config", *map(str, arguments)])
        return (ended.value.code, *capsys.readouterr())

    return run


def test_one_tasks_tf_config_is_json(tf_config):
    code, out, _ = tf_config("generate", "--worker=a:1", "--worker", "b:1", "--task=worker:1")
    assert (code, out) == (0, TWO.tf_config(Task("worker", 1)) + "\n")


def test_every_job_can_be_given(tf_config):
    flags = ["--chief=c:1", "--worker=a:1", "--ps=p:1", "--ps=q:1", "--evaluator=e:1"]
    _, out, _ = tf_config("generate", *flags, "--task=ps:1")
    jobs = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1", "q:1"], "evaluator": ["e:1"]}
    assert json.loads(out) == {"cluster": jobs, "task": {"type": "ps", "index": 1}}


def test_all_tasks_are_lines_that_a_shell_takes(tf_config):
    code, out, _ = tf_config("generate", f"--cluster={SAMPLES / 'chief_workers_ps.json'}", "--all")
    assert code == 0
    lines = out.splitlines()
    assert [line.rpartition("# ")[2] for line in lines] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    for line in lines:
        done = subprocess.run(["sh", "-c", f'{line}\nprintf %s "$TF_CONFIG"'], capture_output=True, text=True)
        assert str(parse(done.stdout, source="sh").task) == line.rpartition("# ")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=worker:0"], "no address is given"),
        (["--worker=a:1", "--cluster=x", "--all"], "both given"),
        (["--worker=a:1"], "neither --task nor --all"),
        (["--worker=a:1", "--all", "--task=worker:0"], "both --task and --all"),
        (["--worker=a:1", "--task=worker:1"], "Its tasks are worker:0"),
        (["--worker=a:1", "--task=master:1"], "Call it chief"),
        (["--worker=a", "--worker=b:0", "--all"], "cluster.worker[1]: there is no port 0"),
        (["--cluster=nowhere.json", "--all"], "No such file"),
    ],
)
def test_what_cannot_be_generated_is_said(tf_config, arguments, message):
    code, out, err = tf_config("generate", *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.json")), ids=lambda p: p.name)
def test_the_samples_are_sound_and_explained_within_80_columns(tf_config, path):
    code, out, _ = tf_config("check", path)
    assert code == 0
    assert "nothing is wrong" in out
    code, out, _ = tf_config("explain", path)
    assert code == 0
    assert "The chief is" in out
    assert max(map(len, out.splitlines())) <= 80
    assert path.name in path.with_name("README.md").read_text()


def test_every_problem_is_listed_with_place_and_cure(tf_config, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"cluster": {"worker": ["a", "b:0"]}}')
    code, out, err = tf_config("check", path)
    assert (code, err) == (2, "")
    assert out.splitlines() == [
        f"{path}: 2 things are wrong.",
        "  cluster.worker[0]: the port is missing",
        "      Write host:port, such as a:2222.",
        "  cluster.worker[1]: there is no port 0",
        "      Write a number from 1 to 65535, such as b:2222.",
    ]


def test_standard_input_is_read(tf_config, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TWO.tf_config(Task("worker", 1))))
    code, out, _ = tf_config("check", "-")
    assert code == 0
    assert "standard input: nothing is wrong" in out
    assert "It is for worker:1" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("nonsense"))
    code, _, err = tf_config("explain", "-")
    assert code == 2
    assert "line 1, column 1" in err


def test_without_a_file_the_environment_is_checked_and_must_name_a_task(tf_config, monkeypatch):
    assert "nothing at all" in tf_config("check")[1]
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    code, out, _ = tf_config("check")
    assert code == 2
    assert "task: it is missing" in out
    monkeypatch.setenv("TF_CONFIG", TWO.tf_config(Task("worker", 0)))
    assert tf_config("check")[0] == 0


def test_without_a_file_what_this_process_was_given_is_explained(tf_config, monkeypatch):
    assert "it trains alone" in tf_config("explain")[1]
    monkeypatch.setenv("TF_CONFIG", TWO.tf_config(Task("worker", 1)))
    code, out, _ = tf_config("explain")
    assert code == 0
    assert "TF_CONFIG describes 2 tasks" in out
    assert "This process is worker:1" in out
    assert "Replicas in sync: 2 with one device each" in out
    monkeypatch.setenv("TF_CONFIG", "{")
    assert tf_config("explain")[0] == 2


@pytest.mark.parametrize(
    ("jobs", "task", "words"),
    [
        ({"worker": ["a:1"]}, "worker:0", ["One task trains", "1 task."]),
        (
            {"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]},
            "chief:0",
            ["No replicas are in sync", "Workers: 1.", "hold the variables: 1.", "coordinates"],
        ),
        ({"worker": ["a:1"]}, "evaluator:0", ["from outside"]),
        (
            {"worker": [f"host-{i}.with.a.long.name.that.goes.on.and.on.and.on.example.com:1" for i in range(5000)]},
            "worker:77",
            ["worker:0", "worker:77", "worker:4999", "...", "5,000 tasks", "<- this"],
        ),
    ],
)
def test_who_does_what_is_said_in_few_lines(tf_config, monkeypatch, jobs, task, words):
    monkeypatch.setenv("TF_CONFIG", Cluster(jobs).tf_config(Task.parse(task)))
    _, out, _ = tf_config("explain")
    assert all(word in out for word in words), out
    assert len(out.splitlines()) < 25
    assert max(map(len, out.splitlines())) <= 80
