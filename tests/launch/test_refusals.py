"""What can't be launched is said, and nothing is started."""

import os
import pathlib
import socket
import subprocess
import sys

import limits
import pytest


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_with_who_has_it(launcher):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err, _ = launcher.run(launcher.cluster_file([f"127.0.0.1:{port}"]), body="print('ran')")
    assert code == 2
    assert f"worker:0 is to listen on port {port}, but that port can't be had" in err
    assert f"process {os.getpid()}" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster=no such file.json"], "can't be read"),
        (["--workers=1", "--show=worker:3"], "worker:3"),
        (["--workers=1", "--log_dir=/proc/nowhere"], "can't be written"),
    ],
)
def test_what_can_not_be_is_said_and_starts_nothing(launcher, flags, said):
    code, out, err, seconds = launcher.run(*flags, body="print('ran')")
    assert code == 2, (out, err)
    assert said in err
    assert "Traceback" not in err
    assert "ran" not in out
    limits.keep(seconds, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [([], "none is named"), (["no such.py"], "no such file"), (["."], "a directory"), (["-m"], "none is named")],
)
def test_a_script_that_is_not_there_is_said(launcher, command, said):
    process = subprocess.run(
        [sys.executable, "-m", "toolkit", "launch", "--workers=1", *command],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
        cwd=launcher.folder,
    )
    assert process.returncode == 2
    assert said in process.stderr


@pytest.mark.slow
def test_a_host_that_is_not_this_machine_is_said(launcher):
    code, _, err, _ = launcher.run("--workers=1", "--host=192.0.2.99", body="print('ran')")
    assert code == 2
    assert "this machine doesn't have that address" in err
