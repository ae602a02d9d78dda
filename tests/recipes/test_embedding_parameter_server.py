"""The recommender comes close to the best loss there can be, with its tables on parameter servers and on one device."""

import re

import processes
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]
FLAGS = ("--users=50000", "--items=20000", "--epochs=2", "--steps_per_epoch=150", "--batch_size=512")


def loss(text):
    return float(re.search(r"loss (\d\.\d+); the best possible is 0\.250", text)[1])


@pytest.mark.smoke
@pytest.mark.parametrize("variables", ["round_robin", "sharded"])
def test_it_learns_beside_parameter_servers(tmp_path, variables):
    arguments = ("-m", "recipes.embedding_parameter_server", f"--variables={variables}", *FLAGS)
    done = processes.launch(tmp_path, *arguments, tasks=processes.SERVED, limit=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 0.24 < loss(done.stdout) < 0.32
    assert ("embeddings[1]" in done.stdout) == (variables == "sharded")


def test_it_learns_on_one_device(tmp_path):
    done = processes.python(tmp_path, "-m", "recipes.embedding_parameter_server", *FLAGS, limit=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0.24 < loss(done.stdout + done.stderr) < 0.32
