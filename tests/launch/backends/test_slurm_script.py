"""What `toolkit launch --on=slurm --dry_run` prints, without a Slurm."""

import os
import pathlib
import shlex
import signal
import subprocess

import pytest

from toolkit.cli.main import main
from toolkit.errors import JobStopped
from toolkit.launch import JobSpec, queues
from toolkit.launch.backends import allocation
from toolkit.launch.record import Record
from toolkit.launch.supervisor.task_group import Preempted
from toolkit.support import signals


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--on=slurm", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_script_is_printed(capsys, tmp_path):
    counts = ("--nodes=2", "--chief", "--workers=2", "--ps=1", "--gpus_per_task=1", "--cpus_per_task=4")
    more = (
        "--time=1-12",
        "--sbatch=qos=long",
        "--sbatch=exclusive",
        "--sbatch=comment=two words",
        f"--log_dir={tmp_path / 'a b'}",
    )
    code, out, _ = printed(capsys, "--dry_run", *counts, *more, "-m", "recipes.x", "--run_dir=it's\n$(x)")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in (
        *("nodes=2", "ntasks-per-node=1", "gpus-per-node=2", "cpus-per-task=8", "time=1-12"),
        *("signal=B:USR1@120", "qos=long", "exclusive", "comment='two words'", "requeue"),
    ):
        assert f"#SBATCH --{option}" in lines
    assert all(line.startswith("#") for line in lines[:-1])
    command = shlex.split(lines[-1])
    assert command[0] == "exec"
    assert command[-1] == str(tmp_path / "a b" / "launch-ID")


@pytest.mark.parametrize(("nodes", "tasks", "rooms"), [(1, 3, [3]), (2, 3, [2, 1]), (3, 7, [3, 2, 2])])
def test_tasks_are_spread_evenly(nodes, tasks, rooms):
    assert JobSpec(command=("x",), on="slurm", nodes=nodes, workers=tasks).rooms == rooms
    assert JobSpec(command=("x",), on="slurm", nodes=nodes, tasks_per_node=2).rooms == [2] * nodes


@pytest.mark.parametrize(
    ("flags", "tasks", "gpus", "said"),
    [
        (["--gpus_per_node=4"], 8, 4, "up to 4, each with 1 GPU"),
        (["--gpus_per_node=4", "--tasks_per_node=1"], 2, 4, "up to 1, each with 4 GPUs"),
        (["--gpus_per_node=4", "--gpus_per_task=2"], 4, 4, "up to 2, each with 2 GPUs"),
        (["--gpus_per_task=1"], 2, 1, "up to 1, each with 1 GPU"),
    ],
)
def test_gpus_of_nodes_have_a_task_each_unless_it_is_said(capsys, flags, tasks, gpus, said):
    code, out, _ = printed(capsys, "--dry_run", "--nodes=2", *flags, "-m", "x")
    assert code == 0
    assert f"#SBATCH --gpus-per-node={gpus}" in out
    assert f"In all {tasks} tasks" in out
    assert said in out


@pytest.mark.parametrize(
    ("flags", "partitions", "cores", "why"),
    [
        (
            [],
            [
                "PartitionName=cpu Default=NO TRES=cpu=64",
                "PartitionName=gpu Default=YES TRES=cpu=128,mem=2T,gres/gpu=8",
            ],
            64,
            "16 cores for each GPU: the partition gpu has 128 cores and 8 GPUs",
        ),
        (
            ["--partition=a100"],
            ["PartitionName=a100 TRES=cpu=128,gres/gpu=8,gres/gpu:a100=8 JobDefaults=DefCpuPerGPU=6"],
            24,
            "6 cores for each GPU: the partition a100 sets that",
        ),
        (["--partition=cpu"], ["PartitionName=cpu TRES=cpu=64"], 4, "scontrol counts no GPUs in the partition cpu"),
        (["--partition=none"], [], 4, "1 core for each GPU: scontrol shows no partition none"),
        (["--cpus_per_task=3"], [], 12, None),
    ],
)
def test_cores_are_those_that_the_site_gives_each_gpu(capsys, tmp_path, monkeypatch, flags, partitions, cores, why):
    answer = "\n".join(partitions)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, out, _ = printed(capsys, "--dry_run", "--nodes=2", "--gpus_per_node=4", *flags, "-m", "x")
    assert code == 0
    assert f"#SBATCH --cpus-per-task={cores}\n" in out
    if why is None:
        assert "for each GPU:" not in out
    else:
        assert f"{why}. --cpus_per_task sets the cores of a task." in out


def test_the_script_says_by_which_command_it_was_written(capsys):
    _, out, _ = printed(capsys, "--dry_run", "--nodes=2", "-m", "x", "--name=it's a\nline")
    assert "\n# Written by: toolkit launch --on=slurm --nodes=2 -m x '--name=it'\"'\"'s a\\nline'\n" in out


def test_an_array_is_refused(capsys):
    code, _, err = printed(capsys, "--dry_run", "--sbatch=array=0-3", "-m", "x")
    assert code == 2
    assert "each element of an array would be this job once more" in err


def test_without_slurm_it_says_so(capsys, monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, _, err = printed(capsys, f"--log_dir={tmp_path}", "train.py")
    assert code == 2
    assert "there is no sbatch on this machine" in err


def test_a_script_that_is_not_there_is_said_before_it_is_submitted(capsys):
    code, _, err = printed(capsys, "no such.py")
    assert code == 2
    assert "launch starts the script no such.py, but there is no such file" in err


def test_a_log_directory_that_slurm_would_read_otherwise_is_refused(capsys, monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, _, err = printed(capsys, "--log_dir=a\\b", "train.py")
    assert code == 2
    assert "Slurm reads a backslash" in err
    assert not pathlib.Path("a\\b").exists()


def test_the_signal_that_ends_a_job_queued_again_may_come_at_once(tmp_path, monkeypatch):
    """Slurm sends it while `scontrol requeue` is still about to return."""

    def requeue(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", requeue)
    record = Record(tmp_path / "launch-20260101-000000-abcd")
    record.directory.mkdir()
    with signals.recorded() as received:
        allocation._requeue(queues.find("slurm"), "4711", record, "its time was nearly up", received)
    assert received == [signal.SIGTERM]


def test_a_node_that_is_about_to_be_taken_away_has_the_job_queued_again(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    place = allocation.QueueBackend(JobSpec(command=("train.py",), on="slurm", nodes=2), [])
    assert place.out(Preempted(15)) == "a node is about to be taken away"
    assert place.out(JobStopped(15)) == ""
