"""What `toolkit launch --engine=slurm --dry_run` prints, and what it refuses, without a Slurm."""

import pathlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.main import main
from toolkit.errors import LaunchError
from toolkit.launch.backends import slurm


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--engine=slurm", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_script_is_printed(capsys, tmp_path):
    flags = (
        "--nodes=2",
        "--chief",
        "--workers=2",
        "--ps=1",
        "--gpus_per_task=1",
        "--time=1-12",
        f"--log_dir={tmp_path}",
    )
    code, out, _ = printed(capsys, "--dry_run", *flags, "-m", "recipes.x", "--run_dir=it's $(x)")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in ("nodes=2", "ntasks=4", "gpus-per-task=1", "time=1-12", "signal=B:USR1@120", "requeue"):
        assert f"#SBATCH --{option}" in lines
    command = shlex.split(lines[-1])
    assert command[0] == "exec"
    assert "--tasks=chief:1,worker:2,ps:1" in command
    assert command[-3:] == ["-m", "recipes.x", "--run_dir=it's $(x)"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes=0", "train.py"], "--nodes=0"),
        (["--time=soon", "train.py"], "no length of time of Slurm's"),
        (["--time=2", "train.py"], "as soon as they begin"),
        (["--time=0-0:1:30", "--notice=90", "train.py"], "as soon as they begin"),
        (["--partition=a b", "train.py"], "Slurm's names"),
        (["--job_name=x\n#SBATCH --exclusive", "train.py"], "Slurm's names"),
        (["--nodes=2", "--tasks_per_node=2", "--workers=3", "train.py"], "the jobs have 3 tasks"),
        (["--nodes=4", "--workers=2", "train.py"], "2 tasks to run there"),
        (["--nodes=2"], "none is named"),
        (["--cluster=x.json", "train.py"], "--cluster, but it means nothing with --engine=slurm"),
    ],
)
def test_what_cannot_be_is_said(capsys, flags, said):
    code, _, err = printed(capsys, *flags)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("60", 3600), ("2:30", 150), ("1:02:03", 3723), ("2-3", 183600), ("1-0:30", 88200), ("1-2:03:04", 93784)],
)
def test_a_time_is_as_long_as_slurm_has_it(time, seconds):
    given = {"name": "a", "nodes": 1, "logs": pathlib.Path("l"), "command": ("x",), "time": time}
    slurm.SlurmSpec(**given, notice=seconds - 1)
    with pytest.raises(LaunchError, match="again and again"):
        slurm.SlurmSpec(**given, notice=seconds)


def test_without_slurm_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = printed(capsys, f"--log_dir={tmp_path}", "train.py")
    assert code == 2
    assert "there is no sbatch on this machine" in err


def test_an_unknown_engine(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--engine=pbs", "train.py"])
    assert "Choose local or slurm" in capsys.readouterr().err


@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0"), max_size=30), max_size=4))
def test_whatever_the_arguments_a_shell_hands_them_on_as_they_are(arguments):
    request = slurm.SlurmSpec(name="a", nodes=1, logs=pathlib.Path("l"), command=("-m", "x", *arguments))
    text = slurm.script(request)
    head, _, command = text.partition("exec ")
    assert all(line.startswith("#") for line in head.splitlines())
    assert shlex.split(command)[-len(arguments) - 2 :] == ["-m", "x", *arguments]
