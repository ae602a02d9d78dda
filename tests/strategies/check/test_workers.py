"""Several workers compare their first steps with one device's, and come to one verdict."""

import pathlib

import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("workers.py")


@pytest.mark.slow
def test_workers_compute_one_devices_step(tmp_path):
    with processes.group([SCRIPT], [["none"]] * 2, tmp_path) as run:
        outputs = run.succeed(limit=150)
    for each in outputs:
        compared = [line for line in each.splitlines() if "is one device's" in line]
        assert [line.split(" is ")[0] for line in compared] == [
            f"SAID The first step of {call}" for call in ("fit", "evaluate", "predict")
        ]


@pytest.mark.slow
def test_workers_compute_the_first_rows_of_what_one_device_cannot_hold(tmp_path):
    with processes.group([SCRIPT], [["small"]] * 2, tmp_path) as run:
        outputs = run.succeed(limit=200)
    for each in outputs:
        fit, evaluate, predict = [line for line in each.splitlines() if "is one device's" in line]
        assert ", of the first 3 of 9 rows: one device can't hold all of them" in fit
        assert ", of the first 3 of 7 rows: " in evaluate
        assert "rows" not in predict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [("metric", "metric accuracy/"), pytest.param("draw", "the output of dropout", marks=pytest.mark.long)],
)
def test_all_workers_end_where_one_has_found_a_difference(tmp_path, fault, named):
    with processes.group([SCRIPT], [[fault]] * 2, tmp_path) as run:
        codes = run.wait(limit=150)
        said = run.outputs
    assert codes == [2, 2], said
    assert all(named in each for each in said)
