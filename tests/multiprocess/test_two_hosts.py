"""The recipe on two hosts, which are network namespaces."""

import re

import pytest
import two_hosts
from two_hosts import cluster_in, finish, start


@pytest.fixture
def hosts():
    """Names of two namespaces that reach each other."""
    with two_hosts.made() as names:
        yield names


FLAGS = ("--data=shapes", "--epochs=1", "--steps_per_epoch=5")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [False, True], ids=["by hand", "a launcher on each host"])
def test_the_recipe_runs_on_two_hosts(hosts, tmp_path, launcher):
    cluster = cluster_in(tmp_path)
    running = []
    for number, name in enumerate(hosts):
        recipe = ["recipes.cifar_multi_worker", *FLAGS, f"--run_dir=run{number}"]
        if launcher:
            # Each finds out by itself which of the addresses are its own.
            command = ["toolkit", "launch", "--show=all", cluster, f"--log_dir=logs{number}", "-m", *recipe]
        else:
            command = [*recipe, cluster, f"--task=worker:{number}"]
        running.append(start(name, tmp_path, *command))
    outs = finish(running, 200)
    assert [process.returncode for process in running] == [0, 0], "\n".join(out[-2500:] for out in outs)
    hashes = [re.search(r"Done: .*weights (\w+)", out)[1] for out in outs]
    assert hashes[0] == hashes[1]
    assert (tmp_path / "run0" / "summary.json").exists()
    assert not (tmp_path / "run1").exists()


@pytest.mark.long
@pytest.mark.slow
def test_an_index_that_belongs_to_another_host_is_said(hosts, tmp_path):
    cluster = cluster_in(tmp_path)
    flags = ["recipes.cifar_multi_worker", "--start_timeout=8", *FLAGS]
    # The first host takes the second's index for its own: at its own address it finds itself.
    running = [start(hosts[0], tmp_path, *flags, cluster, "--task=worker:1", "--run_dir=run")]
    (out,) = finish(running, 60)
    assert running[0].returncode == 2, out[-2000:]
    assert "worker:1 looks for worker:0 at 10.177.0.1:2222, but the task there says that it is worker:1" in out
