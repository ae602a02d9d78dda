"""Unmodified compile, fit, evaluate and predict in several processes."""

import json
import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("fit_kinds.py")
# What a single process and several must agree on; batch normalisation that isn't synchronised can't.
SAME_OF_FEW = ["numpy", "tf.data", "class_weight", "tables"]
SAME = [*SAME_OF_FEW, "PyDataset", "in scope", "steps_per_epoch", "dictionary", "sample_weight", "frozen", "sequences"]
OTHERS_OF_FEW = ["steps_per_execution", "callbacks", "loss scale"]
OTHERS = [*OTHERS_OF_FEW, "shuffled", "validation_split"]


def run(folder, count, amount):
    shared = folder / "shared"
    shared.mkdir()
    arguments = [[str(folder / f"{number}.json"), str(shared), amount] for number in range(count)]
    with processes.group([SCRIPT], arguments, folder, cluster=count > 1) as group:
        group.succeed(limit=280)
    return [json.loads(pathlib.Path(out).read_text()) for out, *_ in arguments], shared


@pytest.fixture(scope="module")
def seen(tmp_path_factory, request):
    """What two workers saw, the directory that they shared, and what one process saw."""
    two, shared = run(tmp_path_factory.mktemp("two"), 2, request.param)
    (one,), _ = run(tmp_path_factory.mktemp("one"), 1, request.param)
    return two, shared, one


def with_kinds(few, everything):
    """Parametrises a test by kinds of the run of few of them, and in the long part by all."""
    cases = [("few", kind) for kind in few]
    cases += [pytest.param("all", kind, marks=pytest.mark.long) for kind in everything]
    return pytest.mark.parametrize(("seen", "kind"), cases, indirect=["seen"], scope="module")


with_few = pytest.mark.parametrize("seen", ["few"], indirect=True, scope="module")
pytestmark = pytest.mark.slow


@with_kinds(SAME_OF_FEW + OTHERS_OF_FEW, SAME + OTHERS)
def test_both_workers_end_with_the_same_metrics_and_weights(seen, kind):
    (first, second), _, _ = seen
    assert first[kind]["history"] == second[kind]["history"]
    assert first[kind]["weights"] == second[kind]["weights"]


@with_kinds(SAME_OF_FEW, SAME)
def test_the_numbers_are_those_of_one_process(seen, kind):
    (first, _), _, one = seen
    for name, values in one[kind]["history"].items():
        np.testing.assert_allclose(first[kind]["history"][name], values, atol=1e-6, err_msg=name)
    for mine, theirs in zip(first[kind]["weights"], one[kind]["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@with_few
def test_metrics_count_every_example_once(seen):
    (first, _), _, _ = seen
    assert first["evaluate"][1] * 103 == pytest.approx(round(first["evaluate"][1] * 103), abs=1e-3)
    for kind in ("numpy", "tf.data"):
        accuracy = first[kind]["history"]["accuracy"][0] * 103
        assert accuracy == pytest.approx(round(accuracy), abs=1e-3), kind


@with_kinds(["predict"], ["predict", "predict dictionary"])
def test_predictions_come_whole_and_in_order(seen, kind):
    (first, second), _, one = seen
    assert np.shape(first[kind]) == (103, 2)
    assert first[kind] == second[kind]
    np.testing.assert_allclose(first[kind], one[kind], atol=1e-6)


@with_few
def test_callbacks_of_all_workers_share_their_paths(seen):
    (first, second), shared, _ = seen
    assert sorted(p.name for p in (shared / "best").iterdir()) == ["1.keras", "2.keras"]
    assert (shared / "newest.weights.h5").exists()
    assert len((shared / "log.csv").read_text().splitlines()) == 3, "a heading and two epochs"
    assert len(list((shared / "board" / "train").iterdir())) == 1, "only the chief writes for TensorBoard"
    assert not (shared / "backup").exists(), "BackupAndRestore removes it at the end"
    assert first["chief"]
    assert not second["chief"]


@with_few
def test_a_model_that_all_workers_save_can_be_loaded(seen):
    (first, second), shared, _ = seen
    assert first["loaded"] < 1e-6
    assert second["loaded"] < 1e-6
    assert first["exported"] < 1e-6
    assert second["exported"] < 1e-6
    assert not list(shared.glob(".model*")), "a file written aside is left"
