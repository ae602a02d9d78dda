"""What users do, crossed as Hypothesis draws it: weights, history, counts and the examples used are plain Keras's.

Another seed draws other crossings. A failure names the seed, and each crossing as crossings.py takes it:

    TOOLKIT_CROSSINGS_SEED=7 python -m pytest tests/conformance/test_crossings.py -m long
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import time

import batteries
import crossings
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("crossings.py")
SEED = int(os.environ.get("TOOLKIT_CROSSINGS_SEED", "65"))
STALLED = 200  # Seconds without a result, on a busy machine.
FEW, MANY, OF_WORKERS = 20, 300, 100


@contextlib.contextmanager
def doing(kind, some, folder):
    """Starts the programs that do some crossings of a kind; gives a function that waits for what they see.

    It returns for each crossing what each process saw, and ends with the last that all came to the end of.
    """
    folder.mkdir()
    source = folder / "crossings.json"
    source.write_text(json.dumps(some))
    outs = [folder / f"{task}.jsonl" for task in range(2 if kind == "multi_worker" else 1)]
    arguments = [[kind, str(source), str(out)] for out in outs]

    def records():
        lines, since = [], time.monotonic()
        while time.monotonic() < since + STALLED and any(each.poll() is None for each in running.processes):
            before, lines = lines, [out.read_text().count("\n") if out.exists() else 0 for out in outs]
            since = since if lines == before else time.monotonic()
            time.sleep(0.1)
        texts = [out.read_text().splitlines() if out.exists() else [] for out in outs]
        return [[json.loads(line) for line in each] for each in zip(*texts, strict=False)]

    with processes.group([SCRIPT], arguments, folder, cluster=len(outs) > 1) as running:
        yield records


def everything(kind, some, folder):
    """What processes saw of each crossing. After one that never ends they are started again; it has None."""
    found = []
    while len(found) < len(some):
        rest = some[len(found) :]
        if kind == "multi_worker":  # A process has strategies of several workers with the same options only.
            rest = list(next(itertools.groupby(rest, lambda crossing: crossing["state"]))[1])
        with doing(kind, rest, folder / f"{kind}-{len(found)}") as records:
            done = records()
        found += done + [None] * (len(done) < len(rest))
    return found


def wrong(kind, some, plain, many):
    """Returns a text of the crossings whose numbers aren't plain Keras's; "" for none."""
    texts = []
    for crossing, one, others in zip(some, plain, many, strict=True):
        found = (
            ["it never ends, or ends the program"]
            if others is None
            else crossings.differences_of_all(others, one[0], crossing, kind)
        )
        if found:
            texts.append("\n    ".join([json.dumps(crossings.changed(crossing)), *found]))
    return "\n".join(texts)


def hold(kind, some, plain, many):
    compared = sum("error" not in one[0] for one in plain)
    assert compared >= 0.8 * len(some) - 1, "plain Keras refuses most of them"
    found = wrong(kind, some, plain, many)
    assert not found, f"seed {SEED}, {compared} crossings of {kind}:\n{found}"


@functools.cache
def few():
    return crossings.drawn(FEW, SEED, pool=200, cheap=True)


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("half", batteries.rows(range(2), 1))
def test_a_few_crossings_are_plain_keras(tmp_path, half):
    some = few()[half::2]
    parts = [some[::2], some[1::2]]  # Two programs, for two cores.
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(doing("plain+mirrored", part, tmp_path / str(number)))
            for number, part in enumerate(parts)
        ]
        found = [records() for records in programs]
    for part, records in zip(parts, found, strict=True):
        assert len(records) == 2 * len(part)
        hold("mirrored", part, records[: len(part)], records[len(part) :])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "count"), [("mirrored", MANY), ("multi_worker", OF_WORKERS)])
def test_many_crossings_are_plain_keras(tmp_path, kind, count):
    print(f"{count} crossings of {kind}, of seed {SEED}")  # noqa: T201
    some = sorted(crossings.drawn(count, SEED, kind), key=lambda crossing: str(crossing["state"]))
    drawn = {pair for crossing in some for pair in crossing.items()}
    assert len(drawn) > 0.95 * sum(map(len, crossings.DIMENSIONS.values())), "draws leave values out"
    plain = everything("plain", some, tmp_path)
    hold(kind, some, plain, everything(kind, some, tmp_path))


ONE = {
    "history": [{"loss": [0.5, 0.25]}],
    "weights": [[1.0, 2.0]],
    "iterations": 6,
    "steps": 6,
    "used": {"fit 0 train 0": {"0": 1, "1": 1}},
    "readings": [],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"history": [{"loss": [0.5, 0.2501]}]}, "history"),
        ({"history": [{"loss": [0.5]}]}, "history"),
        ({"history": [{"loss": [0.5, 0.25], "mae": [0.1, 0.1]}]}, "history"),
        ({"weights": [[1.0, float("nan")]]}, "weights"),
        ({"iterations": 7}, "iterations: 7"),
        ({"used": {"fit 0 train 0": {"0": 2}}}, "'1': (0, 1)"),
        ({"summary steps": 7}, "summary steps: 7"),
        ({"error": "ValueError: no"}, "error: ValueError: no"),
    ],
)
def test_a_difference_is_said(change, said):
    found = crossings.differences(ONE | change, ONE, crossings.PLAINEST, "mirrored")
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_what_two_workers_used_is_added():
    halves = [ONE | {"used": {"fit 0 train 0": {str(number): 1}}} for number in range(2)]
    assert crossings.differences_of_all(halves, ONE, crossings.PLAINEST, "multi_worker") == []
    assert len(crossings.differences_of_all([halves[0], ONE], ONE, crossings.PLAINEST, "multi_worker")) == 1
