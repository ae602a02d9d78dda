"""What people of other launchers miss: a site's own defaults, commands before the tasks', copies, files of hosts."""

import json
import os
import re
import subprocess
import sys

import limits
import pytest
from processes import ROOT

from toolkit import launch
from toolkit.cli.main import main
from toolkit.errors import LaunchError


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config" / "toolkit").mkdir(parents=True)
    return tmp_path


def printed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--dry_run", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_a_sites_file_is_asked_before_the_defaults_and_after_the_user(site, capsys):
    (site / "config/toolkit/toolkit.toml").write_text(
        '[launch]\nmax_restarts = 2\n[slurm]\npartition = "gpu"\naccount = "mine"\nsetup = ["module load cuda"]\n'
    )
    (site / "toolkit.toml").write_text('[slurm]\npartition = "near"\nsbatch = ["qos=long"]\n')
    code, script, _ = printed(capsys, "--on=slurm", "--sbatch=exclusive", "train.py")
    assert code == 0
    directives = re.findall("#SBATCH --(.*)", script)
    assert {"partition=near", "account=mine", "qos=long", "exclusive"} <= set(directives)
    assert script.startswith("#!/bin/bash -l\n")
    assert script.splitlines()[-3:-1] == ["set -e", "module load cuda"]
    assert "partition=given" in printed(capsys, "--on=slurm", "--partition=given", "train.py")[1]
    # What means nothing at a place isn't asked for there.
    assert printed(capsys, "--workers=1", "train.py")[0] == 0
    assert launch.Launcher(workers=1)._spec["max_restarts"] == 2
    assert launch.Launcher(workers=1, max_restarts=1)._spec["max_restarts"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slurm\n", "toolkit.toml has options for every job here, but it can't be read"),
        ("[slurm]\npartitoin = 1\n", "has partitoin in [slurm], but there is no such thing"),
        ("[nowhere]\n", "has [nowhere], but there is no such thing. Name a table launch, local"),
        ("workers = 2\n", "has workers outside of a table, but there is no such thing. Put it under [launch]"),
        ("[launch]\nmax_restarts = 'x'\n", "toolkit.toml has max_restarts='x', but that is a str"),
    ],
)
def test_what_is_wrong_with_it_is_said(site, capsys, text, said):
    (site / "toolkit.toml").write_text(text)
    code, _, err = printed(capsys, "--workers=1", "train.py")
    assert code == 2
    assert said in err


def test_a_file_of_hosts(tmp_path):
    (tmp_path / "hosts").write_text("# Ours\na\n\nme@b slots=2 max_slots=4  # As Open MPI has it.\nc:3\n")
    spec = launch.JobSpec(command=("train.py",), on=f"ssh:@{tmp_path / 'hosts'}")
    assert [(host.name, host.tasks) for host in spec.hosts] == [("a", 1), ("me@b", 2), ("c", 3)]
    (tmp_path / "empty").write_text("# None\n")
    for name, said in (("empty", "that file names no host"), ("nowhere", "can't be read")):
        with pytest.raises(LaunchError, match=said):
            launch.JobSpec(command=("train.py",), on=f"ssh:@{tmp_path / name}")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["nice -n 5", "sh -c 'exec \"$@\"' -", "sh -c '\"$@\"; exit $?' -"])
def test_a_command_before_the_tasks_own(launcher, prefix):
    """One that becomes the task, and one that waits for it: its stacks and its steps are the task's."""
    body = "print('ran', os.nice(0)); time.sleep(1.5); sys.exit(3 if me else 0)"
    code, out, err, _ = launcher.run("--workers=2", f"--prefix={prefix}", body=body)
    assert code == 3
    assert out.count(f"| ran {5 if prefix.startswith('nice') else 0}") == 2
    assert "worker:1 failed first: it ended with exit code 3" in err
    assert launcher.nothing_left(within=2) is True


@pytest.mark.slow
def test_a_task_behind_a_command_that_waits_answers_signals_and_questions(launcher):
    body = "print('up', flush=True)\ndef stuck(): time.sleep(100)\nstuck()"
    prefix = "--prefix=sh -c '\"$@\"; exit $?' -"
    code, _, err, _ = launcher.run("--workers=2", prefix, "--stall_timeout=3", "--grace=2", body=body)
    assert code == 1
    assert "in stuck" in err


@pytest.mark.slow
def test_a_command_that_is_not_there(launcher):
    code, _, err, seconds = launcher.run("--workers=1", "--prefix=no-such-program -x", body="")
    assert code == 2
    limits.keep(seconds, 12)  # Nobody is waited for.
    assert "there is no program no-such-program on" in err


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True])
def test_a_snapshot_runs_what_the_files_were(tmp_path, module):
    """The script changes its own files, and fails: the next attempt runs the copy."""
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "other.py").write_text("word = 'before'")
    (tmp_path / "train.py").write_text(
        "import os, sys, other\nprint('SEEN', other.word, os.getcwd())\n"
        "for name in ('train.py', 'other.py'): open(name, 'w').write('word = \"after\"; print(word)')\n"
        "sys.exit(os.environ['TOOLKIT_ATTEMPT'] == '1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "launch", "--workers=1", "--snapshot", "--max_restarts=1"]
        + (["-m", "train"] if module else ["train.py"]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"worker:0 | SEEN before {tmp_path}\n") == 2
    (job,) = tmp_path.glob("runs/launch-*/job.json")
    assert not (job.parent / "snapshot" / "runs").exists()
    assert json.loads(job.read_text())["again"].endswith("-m train" if module else "train.py")


def test_a_folder_too_large_for_a_copy_is_refused(site, capsys, monkeypatch):
    from toolkit.launch import record

    monkeypatch.setattr(record, "_MOST_COPIED", 1000)
    (site / "data.bin").write_bytes(b"x" * 1001)
    with pytest.raises(LaunchError, match=r"--snapshot copies .*, but that holds more than"):
        record._take_snapshot(("train.py",), site / "copy")


def test_a_snapshot_leaves_out_the_runs_and_no_package_of_that_name(site):
    from toolkit.launch import record

    for folder in ("runs/old", "model/runs", "model/__pycache__"):
        (site / folder).mkdir(parents=True)
        (site / folder / "file.py").touch()
    record._take_snapshot(("train.py",), site / "logs/copy")
    assert {path.parent.name for path in (site / "logs/copy").rglob("file.py")} == {"runs"}
    assert (site / "logs/copy/model/runs/file.py").exists()


@pytest.mark.parametrize("log_dir", [".", "logs"])
def test_a_snapshot_is_not_copied_into_itself(site, log_dir):
    from toolkit.launch.record import Record

    for _ in range(2):  # Nor are the jobs before.
        made = Record.begin(launch.JobSpec(command=("train.py",), snapshot=True, log_dir=log_dir))
    files = [path for path in made.directory.rglob("*") if path.is_file()]
    assert [path.name for path in files if "snapshot" in path.parts] == ["train.py"]


def test_options_of_sbatch_stand_in_the_file_and_are_replaced_by_flags(site, capsys):
    (site / "toolkit.toml").write_text('[slurm]\nmem = "64G"\nmail_user = "me"\nsbatch = ["exclusive", "qos=long"]\n')
    script = printed(capsys, "--on=slurm", "--mem=0", "train.py")[1]
    given = re.findall("#SBATCH --(.*)", script)
    assert {"mem=0", "mail-user=me", "exclusive", "qos=long"} <= set(given)
    assert "mem=64G" not in given


def test_the_script_says_what_runs(site, capsys):
    flags = ["--on=slurm", "--prefix=numactl -N 0", "--snapshot", "--max_restarts=2"]
    assert (
        "# In all 1 task of numactl -N 0 train.py, from a copy of the script's folder, started again at most 2 times "
        "without progress\n" in printed(capsys, *flags, "train.py")[1]
    )


def test_options_of_sbatch_go_by_their_own_names(site, capsys):
    script = printed(capsys, "--on=slurm", "--qos=long", "--mem=8G", "--sbatch=exclusive", "train.py")[1]
    assert {"qos=long", "mem=8G", "exclusive"} <= set(re.findall("#SBATCH --(.*)", script))


def test_an_option_of_another_name_is_guessed():
    with pytest.raises(LaunchError, match="worker= is given to a launcher, but .*Did you mean workers"):
        launch.submit("train.py", worker=2)


def test_jobs_as_json(site, capsys, monkeypatch):
    from toolkit.launch import jobs
    from toolkit.launch.record import Record

    monkeypatch.setenv("XDG_STATE_HOME", str(site / "state"))
    record = Record.begin(launch.JobSpec(command=("train.py",)))
    record.end(None)
    jobs.add(record)
    with pytest.raises(SystemExit):
        main(["jobs", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["state"], found["command"]) == (record.id, "done", "train.py")
    assert found["directory"] == str(record.directory.absolute())
