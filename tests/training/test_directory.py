import json
import os
import subprocess
import sys

import pytest

from toolkit.errors import CheckpointError, RunDirectoryError
from toolkit.training.directory import RunDirectory, choose


@pytest.fixture
def earlier(tmp_path):
    """A run directory with a run in it."""
    directory = RunDirectory(tmp_path / "run", recipe="mine")
    directory.record_config({"model": "small_cnn", "seed": 1})
    (directory.checkpoints / "step-00000010").mkdir(parents=True)
    directory.close()
    return directory.path


def test_a_new_one_is_made_with_its_parents(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "it's b", recipe="mine")
    assert directory.path.is_dir()
    directory.close()


def test_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="that is a file"):
        RunDirectory(tmp_path / "file", recipe="mine")
    with pytest.raises(RunDirectoryError, match="part of that path is a file"):
        RunDirectory(tmp_path / "file" / "run", recipe="mine")


def test_one_that_may_not_be_written(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    uid = os.geteuid()
    if uid == 0:
        for parent in (tmp_path, *tmp_path.parents[:2]):
            parent.chmod(0o755)
        os.seteuid(65534)  # Root may write anything: be nobody for a moment.
    try:
        for path in (closed, closed / "run"):
            with pytest.raises(RunDirectoryError, match="may not write"):
                RunDirectory(path, recipe="mine")
    finally:
        os.seteuid(uid)


def test_a_full_disk(tmp_path):
    """A file system of 64 kB in a mount namespace of its own."""
    program = (
        "import toolkit.training.directory as d, pathlib, sys\n"
        "full = pathlib.Path(sys.argv[1])\n"
        "run = d.RunDirectory(full / 'run', recipe='mine')\n"
        "for needed in (10**9,):\n"
        "    try:\n        run.check_space(needed)\n"
        "    except Exception as error:\n        print(error)\n"
        "run.close()\n"
        "with open(full / 'ballast', 'wb', buffering=0) as file:\n"
        "    try:\n        while True: file.write(bytes(512))\n"
        "    except OSError:\n        pass\n"
        "try:\n    d.RunDirectory(full / 'run', recipe='mine')\n"
        "except Exception as error:\n    print(error)\n"
    )
    mount = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert "two checkpoints take 2000.0 MB" in done.stdout, done.stderr
    assert "its disk is full" in done.stdout, done.stderr


def test_another_recipes_run(earlier):
    with pytest.raises(RunDirectoryError, match="holds a run of mine, and this is other"):
        RunDirectory(earlier, recipe="other")


def test_an_earlier_run_is_not_overwritten(earlier):
    with pytest.raises(RunDirectoryError, match="--resume"):
        RunDirectory(earlier, recipe="mine")


def test_a_run_killed_in_its_first_checkpoint_starts_anew_and_has_nothing_to_resume(earlier):
    (earlier / "checkpoints" / "step-00000010").rename(earlier / "checkpoints" / ".writing-step-00000010")
    with pytest.raises(CheckpointError, match="it holds no checkpoint"):
        RunDirectory(earlier, recipe="mine", resume=True)
    RunDirectory(earlier, recipe="mine").close()


def test_resume_with_what_it_was_started_with(earlier):
    directory = RunDirectory(earlier, recipe="mine", resume=True)
    directory.record_config({"model": "small_cnn"})
    with pytest.raises(CheckpointError, match="model=alexnet.*started with model=small_cnn"):
        directory.record_config({"model": "alexnet", "seed": 1})
    directory.close()


def test_resume_with_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        RunDirectory(tmp_path / "nowhere", recipe="mine", resume=True)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        RunDirectory(tmp_path, recipe="mine", resume=True)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipe": "mine"}'])
def test_checkpoints_of_nobody_are_left_alone(earlier, text):
    (earlier / "run.json").write_text(text)
    with pytest.raises(RunDirectoryError, match="the script that wrote its checkpoints"):
        RunDirectory(earlier, recipe="mine")


@pytest.mark.slow
def test_a_second_process_is_told_who_holds_it(tmp_path):
    first = RunDirectory(tmp_path / "run", recipe="mine")
    program = (
        "import sys\nfrom toolkit.training.directory import RunDirectory\n"
        "try:\n    RunDirectory(sys.argv[1], recipe='mine')\n"
        "except Exception as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(first.path)], capture_output=True, text=True, timeout=60)
    first.close()
    assert f"process {os.getpid()} is using it" in done.stdout, done.stderr


def test_resume_without_a_name_takes_the_newest(tmp_path):
    for name in ("mine-20260101-000000", "mine-20260102-000000", "other-20260103-000000"):
        (tmp_path / name / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "mine-20260104-000000").mkdir()
    assert choose(None, recipe="mine", resume=True, under=tmp_path)[0].name == "mine-20260102-000000"
    with pytest.raises(CheckpointError, match="no run of third"):
        choose(None, recipe="third", resume=True, under=tmp_path)


def test_it_knows_each_launch_also_one_that_was_killed(tmp_path, monkeypatch):
    for logs, resume in (("first", False), ("first", True), ("second", True)):
        monkeypatch.setenv("TOOLKIT_LOGS", logs)
        directory = RunDirectory(tmp_path / "run", recipe="test", resume=resume)
        directory.record_config({"seed": 1})
        (directory.checkpoints / "step-00000001").mkdir(parents=True, exist_ok=True)
        directory.close()
    assert json.loads((tmp_path / "run/run.json").read_text())["launches"] == ["first", "second"]
