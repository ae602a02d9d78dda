"""XLA in two workers: the same numbers as without it, and no exchange in what it compiles."""

import json
import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("compiled.py")


@pytest.mark.slow
def test_xla_changes_no_numbers_and_compiles_no_exchange(tmp_path):
    outs = [tmp_path / f"{number}.json" for number in range(2)]
    with processes.group([SCRIPT], [[str(out)] for out in outs], tmp_path) as run:
        run.succeed(limit=150)
    mine, other = (json.loads(out.read_text()) for out in outs)
    assert mine["True"] == other["True"], "workers differ"
    np.testing.assert_allclose(mine["True"], mine["False"], atol=2e-6, rtol=2e-6)
    assert mine["compiled"] == ["test_step", "train_step", "update"]
    assert "Conv2DBackpropFilter" in mine["operations"]
    assert not any("Collective" in each for each in mine["operations"])
