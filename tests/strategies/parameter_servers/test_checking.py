"""First steps beside parameter servers are compared with one device's, where one device has such numbers."""

import pathlib

import processes
import pytest

pytestmark = pytest.mark.slow
HERE = pathlib.Path(__file__).parent
IN_ORDER = ["rounds", "in_turn"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return processes.outcome(tmp_path_factory.mktemp("checked"), HERE / "checked_steps.py", limit=240)[0]


@pytest.mark.parametrize("name", [*(f"{mode}, {model}" for mode in IN_ORDER for model in ("plain", "divided", "own")),
                                  "in_turn, words", "rounds, sharded"])  # fmt: skip
def test_steps_are_one_devices(seen, name):
    steps = seen[name]["steps"]
    assert [each["call"] for each in steps] == ["fit", "predict"] if "own" in name else ["fit", "evaluate", "predict"]
    assert not any(each["differs"] or each["skipped"] for each in steps), steps
    assert all(each["tensors"] > 5 for each in steps)


@pytest.mark.parametrize("mode", IN_ORDER)
def test_a_wrong_slot_is_named(seen, mode):
    found = seen[f"{mode}, faulty"]
    assert "kernel_momentum differs by" in found["error"]
    assert len(found["steps"][0]["differs"]) == 1


@pytest.mark.parametrize("mode", IN_ORDER)
def test_nothing_of_a_training_changes(seen, mode):
    checked, unchecked = seen[f"{mode}, divided"], seen[f"{mode}, unchecked"]
    assert checked["weights"] == unchecked["weights"]
    assert checked["losses"] == unchecked["losses"]


def test_a_script_that_is_only_compared_ends_after_each_first_step(seen):
    found = seen["watched"]
    assert [each["call"] for each in found["steps"]] == ["fit", "evaluate", "predict"]
    assert (found["epochs"], found["count"]) == (1, 1)


def test_training_at_the_same_time_has_nothing_to_compare(seen):
    fit, *others = seen["free, plain"]["steps"]
    assert fit["skipped"].startswith("workers train at the same time")
    assert [(each["call"], each["differs"]) for each in others] == [("evaluate", []), ("predict", [])]
    assert all(each["tensors"] for each in others)


def test_what_a_round_does_with_rows_is_known(seen):
    fit = seen["rounds, words"]["steps"][0]
    assert "embedding" in fit["first"]
    assert "added before an optimizer squares them" in fit["known"]


def test_a_training_whose_rows_are_squared_otherwise_says_so_once_and_no_other_does(seen):
    said = [text for text in seen["rounds, words unchecked"]["logged"] if "before Adam squares them" in text]
    assert len(said) == 1
    assert "/embeddings are added before Adam squares them" in said[0]
    assert not any("squares" in text for name in ("rounds, divided", "in_turn, words") for text in seen[name]["logged"])
