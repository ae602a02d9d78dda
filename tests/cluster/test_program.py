"""What tasks compare before they train together."""

import importlib.metadata

import pytest

from toolkit.cluster import describe_program
from toolkit.cluster.rendezvous import remedy
from toolkit.support import status


def test_versions_script_and_flags(tmp_path):
    script = tmp_path / "train1.py"
    script.write_text("pass")
    found = describe_program(str(script), ["--seed=1", "--task_index", "1", "--job_name=worker"], job="x")
    assert found["TensorFlow versions"] == importlib.metadata.version("tensorflow")
    assert found["Keras versions"] == importlib.metadata.version("keras")
    assert set(found) >= {"Python versions", "toolkit versions", "jobs", "scripts"}
    assert found["flags"] == '"--seed=1"'
    assert found["scripts' names"] == "train.py"


def test_workers_with_flags_and_texts_of_their_own(tmp_path):
    """As old tutorials have them: worker0.py with its own index written in it."""
    described = []
    for index in range(2):
        script = tmp_path / f"worker{index}.py"
        script.write_text(f"index = {index}")
        described.append(describe_program(str(script), None))
    assert described[0] == described[1]
    assert describe_program("train.py", None) != describe_program("other.py", None)


def test_who_built_it_is_no_difference_and_what_isnt_installed_is_left_out(monkeypatch):
    def version(name):
        if name == "tensorflow-cpu":
            return "2.21.0+vendor"
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", version)
    assert describe_program(None, None)["TensorFlow versions"] == "2.21.0"
    assert "Keras versions" not in describe_program(None, None)


@pytest.mark.parametrize(
    ("key", "said"), [("jobs", "earlier jobs"), ("Keras versions", "same versions"), ("flags", "script and flags")]
)
def test_each_difference_has_its_remedy(key, said):
    assert said in remedy(key)


def test_a_job_is_known_by_name_and_start_unless_each_host_has_its_own_launcher(monkeypatch):
    assert status.attempt_id() is None
    monkeypatch.setenv(status.JOB_ID, "slurm-7")
    monkeypatch.setenv(status.ATTEMPT, "2")
    assert status.attempt_id() == "slurm-7, attempt 2"
    monkeypatch.setenv(status.PARTIAL, "1")
    assert status.attempt_id() is None
