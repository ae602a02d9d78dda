"""A recipe that is started by hand shows its own lines; TensorFlow's notes are there for who asks."""

import os
import re
import subprocess
import sys

import processes
import pytest

NOTE = re.compile(r"^[IW]\d{4} |^WARNING: All log messages before|failed call to cuInit", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("asked", [False, True])
def test_notes_are_shown_to_who_asks(tmp_path, asked):
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    flags = ["--epochs=1", "--data=shapes", "--global_batch_size=4000", "--gpus=3", *(["--native_logs"] * asked)]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.cifar_mirrored", *flags],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": str(processes.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert bool(NOTE.search(done.stdout + done.stderr)) == asked, done.stderr
    assert re.search(r"^error: .*4000", done.stderr, re.MULTILINE), done.stderr
