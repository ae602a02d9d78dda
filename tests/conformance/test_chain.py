"""A run of a model with sharded layers, begun on 4 replicas, gone on with on 2, on 1, and in 2 processes."""

import pathlib
import time

import limits
import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("chain.py")


def goes_on(folder, model, directory, epochs, *, replicas, tasks=1, killed_at=None):
    """What the chief wrote at the end; None where all are killed when a checkpoint of such a step is there."""
    outs = [folder / f"{directory}-{epochs}-{number}.npz" for number in range(tasks)]
    command = [[model, str(replicas), str(epochs), str(folder / directory), str(out)] for out in outs]
    with processes.group([SCRIPT], command, folder, cluster=tasks > 1) as run:
        if killed_at is not None:
            wanted = folder / directory / "checkpoints" / f"step-{killed_at:08}"
            deadline = time.monotonic() + limits.patient(200)
            while not wanted.exists():
                assert time.monotonic() < deadline, run.outputs
                assert all(process.poll() is None for process in run.processes), run.outputs
                time.sleep(0.01)
            return None  # All are killed as the group is left.
        run.succeed(limit=200)
    return dict(np.load(outs[0]))


LINKS = {  # Replicas of each task, by shards, and tasks.
    "sharded": ((4, 1), (2, 1), (1, 1), (1, 2)),
    "sharded_vit": (("4/2", 1), (2, 1), (1, 1), (1, 2)),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", LINKS)
def test_the_curve_goes_on_at_any_number_of_replicas(tmp_path, model):
    one = goes_on(tmp_path, model, "alone", 4, replicas=1)
    for epochs, (replicas, tasks) in enumerate(LINKS[model], 1):
        many = goes_on(tmp_path, model, "chain", epochs, replicas=replicas, tasks=tasks)
        np.testing.assert_allclose(many["losses"], one["losses"][:epochs], atol=1e-5, rtol=0)
    for key in one:
        np.testing.assert_allclose(many[key], one[key], atol=1e-5, rtol=0, err_msg=key)


@pytest.mark.long
@pytest.mark.slow
def test_a_chain_of_kills_ends_with_one_processes_weights(tmp_path):
    """4, 2 and 1 processes, killed in the midst of epochs, and 2 to the end: groups of 2, of all, and none."""
    model, epochs = "sharded_vit", 5
    one = goes_on(tmp_path, model, "alone", epochs, replicas=1)
    for replicas, tasks, step in (("1/2", 4, 4), (1, 2, 12), (1, 1, 20)):
        goes_on(tmp_path, model, "chain", epochs, replicas=replicas, tasks=tasks, killed_at=step)
    many = goes_on(tmp_path, model, "chain", epochs, replicas="1/1", tasks=2)
    np.testing.assert_allclose(many["losses"][-1], one["losses"][-1], atol=1e-5, rtol=0)
    for key in one:
        np.testing.assert_allclose(many[key], one[key], atol=1e-5, rtol=0, err_msg=key)
