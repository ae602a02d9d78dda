"""What Keras users do, as docs/features.csv has it: each cell of the table is what comes of it under that strategy.

"same numbers": one device's, to 1e-5; to 1e-2 in 16 bits. "works": it ends, with finite numbers of the same shapes.
"refused: ...": it ends in a sentence that says this. "not tried": it isn't run.
"""

import collections
import csv
import functools
import json
import pathlib
import re
import tempfile

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("features.py")
TABLE = processes.ROOT / "docs" / "features.csv"
ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
COLUMNS = {"mirrored": "mirrored", "sharded": "sharded", "run": "run", "xla": "xla", "workers": "multi_worker"}
COLUMNS |= {"xla_workers": "xla_workers"}
COLUMNS |= {served: served for served in ("in_turn", "rounds", "free")}
TRIED = [row["name"] for row in ROWS if row["one_device"] != "not tried"]
# In scripts/test, with one process of two devices: what no other test there does.
PLAIN = [
    "custom_train_step",
    "custom_train_step_without_call_and_two_optimizers",
    "a_loss_for_each_example",
    "recompile",
    "clipping",
    "several_outputs",
    "generator",
    "numpy_shuffled",
    "metrics_that_are_dicts",
    "early_stopping_with_best_weights",
    "save_and_load",
    "predict_on_uneven_data",
]
SIXTEEN_BITS = ("mixed_bfloat16", "mixed_float16")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@functools.cache
def seen(strategy, names):
    """What features.py saw of each: lists of numbers by name, or the exception that it ended in."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        arguments = [str(SCRIPT), strategy, "1" if strategy == "one_device" else "2", str(out), *names]
        served = dict.fromkeys(("in_turn", "rounds", "free"), processes.SERVED)
        tasks = (dict.fromkeys(("multi_worker", "xla_workers"), ("--workers=2",)) | served).get(strategy)
        if tasks:
            flags = (f"--env=FEATURES={folder}",)
            ended = processes.launch(folder, *flags, *arguments, tasks=tasks, limit=800)
        else:
            ended = processes.python(folder, *arguments, limit=800, FEATURES=folder)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return json.loads(out.read_text())


def hold(cell, name, many, one):
    if cell.startswith("refused: "):
        assert cell.removeprefix("refused: ") in many[name], "the sentence is another"
        return
    assert cell in ("same numbers", "works")
    assert not isinstance(one[name], str), one[name]
    assert not isinstance(many[name], str), many[name]
    assert set(many[name]) == set(one[name])
    for key, values in one[name].items():
        if cell == "works":
            # EarlyStopping may end after another epoch.
            assert key.startswith("history") or np.shape(many[name][key]) == np.shape(values), key
            assert np.isfinite(many[name][key]).all(), key
        else:
            tolerance = 1e-2 if name in SIXTEEN_BITS else 1e-5
            np.testing.assert_allclose(many[name][key], values, atol=tolerance, rtol=tolerance, err_msg=key)


@pytest.mark.versions
@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_half_is_one_devices_on_two(name):
    names = tuple(PLAIN)
    row = next(row for row in ROWS if row["name"] == name)
    hold(row["mirrored"], name, seen("mirrored", names), seen("one_device", names))


@pytest.mark.long
@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("column", COLUMNS)
def test_a_cell_of_the_table(column, name):
    row = next(row for row in ROWS if row["name"] == name)
    hold(row[column], name, seen(COLUMNS[column], tuple(TRIED)), seen("one_device", tuple(TRIED)))


def test_the_table_has_every_feature_of_the_script_and_no_other():
    defined = re.findall(r"^@feature\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
    assert sorted(defined) == sorted(row["name"] for row in ROWS)


def test_most_cells_are_one_devices_numbers():
    counts = collections.Counter(row[column].partition(":")[0] for row in ROWS for column in COLUMNS)
    assert set(counts) == {"same numbers", "works", "refused", "not tried"}
    assert counts["same numbers"] > len(ROWS) * 3.7
