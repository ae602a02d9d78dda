"""Batches of other sizes, for which one worker alone may have to trace its functions again."""

import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("odd_batches.py")


@pytest.mark.slow
@pytest.mark.long
def test_sharded_layers_take_last_batches_of_any_size(tmp_path):
    seen = []
    for workers in (1, 2):
        outs = [tmp_path / f"{workers}-{number}.npz" for number in range(workers)]
        with processes.group([SCRIPT], [[str(out)] for out in outs], tmp_path, cluster=workers > 1) as run:
            run.succeed(limit=100)
        seen.append(dict(np.load(outs[0])))
    for key, array in seen[0].items():
        np.testing.assert_allclose(seen[1][key], array, atol=1e-6, err_msg=key)
