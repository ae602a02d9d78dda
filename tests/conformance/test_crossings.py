"""Two options at once: the numbers of one device, or a sentence that refuses them.

All pairs are in the long tests. In scripts/test are rows of many options at once that have every pair between them.
"""

import functools
import itertools
import json
import pathlib
import re
import tempfile

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("crossings.py")
NAMES = re.findall(r'"(\w+)"', re.search(r"OPTIONS = \((.*?)\n\)", SCRIPT.read_text(), re.DOTALL)[1])
# Of two options that exclude each other: what is said of them.
REFUSED = {
    ("sharded", "local"): "a sharded layer exchanges activations in each step",
    ("zero1", "local"): "replicas that train by themselves exchange nothing in a step",
    ("powersgd", "local"): "replicas that train by themselves exchange nothing in a step",
}
# By their meaning other numbers than one device's: an average after each call, not after each step.
OTHER_NUMBERS = {("local", "several_steps")}
_MOST = 9  # Options in a row.
PAIRS = list(itertools.combinations(NAMES, 2))


def covering():
    """Returns rows of options that may meet, such that each pair of those is in one."""
    apart = set(REFUSED) | OTHER_NUMBERS
    missing, rows = {pair for pair in PAIRS if pair not in apart}, []
    while missing:
        row = list(min(missing))
        for name in sorted(
            NAMES, key=lambda name: -sum(name in pair and not set(row).isdisjoint(pair) for pair in missing)
        ):
            if (
                len(row) < _MOST
                and name not in row
                and not any(tuple(sorted((name, each), key=NAMES.index)) in apart for each in row)
            ):
                row.append(name)
        row.sort(key=NAMES.index)
        missing -= set(itertools.combinations(row, 2))
        rows.append("+".join(row))
    return rows


@functools.cache
def seen(strategy, crossings):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        replicas = "1" if strategy == "one_device" else "2"
        ended = processes.python(folder, str(SCRIPT), strategy, replicas, str(out), *crossings, limit=800)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return json.loads(out.read_text())


def hold(crossing, many, one):
    names = set(crossing.split("+"))
    said = next((sentence for pair, sentence in REFUSED.items() if names.issuperset(pair)), None)
    if said:
        assert said in many, many
        return
    assert not isinstance(one, str), one
    assert not isinstance(many, str), many
    tolerance = 1e-2 if "float16" in names else 1e-4 if "powersgd" in names else 1e-5
    for key, values in one.items():
        if any(names.issuperset(pair) for pair in OTHER_NUMBERS):
            assert np.isfinite(many[key]).all()
        else:
            np.testing.assert_allclose(many[key], values, atol=tolerance, err_msg=key)


def test_rows_have_every_pair():
    rows = [set(row.split("+")) for row in covering()]
    assert len(rows) < 12
    for pair in PAIRS:
        assert any(row.issuperset(pair) for row in rows) != (pair in REFUSED or pair in OTHER_NUMBERS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", covering())
def test_many_options_at_once(row):
    rows = tuple(covering())
    hold(row, seen("mirrored", rows)[row], seen("one_device", rows)[row])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", ["+".join(pair) for pair in PAIRS])
def test_a_pair_of_options(pair):
    pairs = tuple("+".join(pair) for pair in PAIRS)
    hold(pair, seen("mirrored", pairs)[pair], seen("one_device", pairs)[pair])
