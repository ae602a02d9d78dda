"""scripts/run and scripts/test: what they install, and what they say meanwhile. A stub takes Python's place."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STUB = """#!/bin/sh
echo "$*" >> calls
case "$*" in
*--editable*)
    echo "Collecting tensorflow"
    echo "  Downloading tensorflow-2.21.0-cp311.whl (620.7 MB)"
    echo "  Downloading absl_py-2.1.whl (130 kB)"
    echo "Installing collected packages: a, b, c"
    [ ! -e broken ] || { echo "ERROR: no space" >&2; exit 1; } ;;
*pytest*) [ ! -e broken ] ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(STUB)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    return tmp_path


def call(clone, script, *arguments):
    (clone / "calls").unlink(missing_ok=True)
    command = ["sh", f"scripts/{script}", *arguments]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=30)
    calls = (clone / "calls").read_text().splitlines()
    return done, [line.rpartition("--editable ")[2] for line in calls if "--editable" in line], calls


def test_the_first_training_installs_no_data_sets_and_says_what_takes_long(clone):
    done, installed, calls = call(clone, "run", "--epochs=2")
    assert done.returncode == 0, done.stderr
    assert installed == ["."]
    assert calls[-1] == "-m recipes.cifar_mirrored --gpus=2 --epochs=2"
    assert "tensorflow-2.21.0-cp311.whl (620.7 MB)" in done.stderr
    assert "Unpacking 3 packages" in done.stderr
    assert "absl_py" not in done.stderr
    assert call(clone, "run")[1] == []


def test_what_is_installed_is_not_installed_again(clone):
    assert call(clone, "run", "--data=cifar10")[1] == [".[datasets]"]
    assert call(clone, "test")[1] == [".[test]"]
    assert [call(clone, *words)[1] for words in (["run"], ["run", "--data=cifar10"], ["test"])] == [[], [], []]
    with (clone / "setup.py").open("a") as file:
        file.write("# Changed.\n")
    assert call(clone, "run")[1] == ["."]


def test_an_installation_that_fails_ends_the_script_and_comes_again(clone):
    (clone / "broken").touch()
    done, _, calls = call(clone, "run")
    assert done.returncode == 1
    assert "no space" in done.stderr
    assert "recipes" not in calls[-1]
    (clone / "broken").unlink()
    assert call(clone, "run")[1] == ["."]


def test_the_checks_say_what_they_check_and_what_that_proves(clone):
    done, _, calls = call(clone, "test")
    assert done.returncode == 0
    assert "numbers    every strategy trains" in done.stdout
    assert "All checks passed: on this machine every strategy has the numbers of one device" in done.stdout
    assert "smoke and not long" in calls[-1]
    (clone / "broken").touch()
    done, _, _ = call(clone, "test")
    assert done.returncode == 1
    assert "A check failed" in done.stderr
    assert call(clone, "test", "tests/launch")[2][-1].endswith("--max-worker-restart=0 tests/launch")
