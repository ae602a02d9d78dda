"""A run of a model with sharded layers, begun on 4 replicas, gone on with on 2, on 1, and in 2 processes."""

import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("chain.py")


def goes_on(folder, directory, epochs, *, replicas, together=False):
    outs = [folder / f"{directory}-{epochs}-{number}.npz" for number in range(2 if together else 1)]
    command = [[str(replicas), str(epochs), str(folder / directory), str(out)] for out in outs]
    with processes.group([SCRIPT], command, folder, cluster=together) as run:
        run.succeed(limit=200)
    return dict(np.load(outs[0]))


@pytest.mark.long
@pytest.mark.slow
def test_the_curve_goes_on_at_any_number_of_replicas(tmp_path):
    one = goes_on(tmp_path, "alone", 4, replicas=1)
    for epochs, replicas, together in ((1, 4, False), (2, 2, False), (3, 1, False), (4, 1, True)):
        many = goes_on(tmp_path, "chain", epochs, replicas=replicas, together=together)
        np.testing.assert_allclose(many["losses"], one["losses"][:epochs], atol=1e-5, rtol=0)
    for key in one:
        np.testing.assert_allclose(many[key], one[key], atol=1e-5, rtol=0, err_msg=key)
