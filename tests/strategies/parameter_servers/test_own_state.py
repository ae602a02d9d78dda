"""What a layer's steps make of its own state beside parameter servers: one device's where steps don't overlap."""

import pathlib

import numpy as np
import processes
import pytest

pytestmark = pytest.mark.slow
HERE = pathlib.Path(__file__).parent
# Of their values in free training, those that don't depend on which steps overlap.
SUMS = {
    "OfExamples": ("count", "kinds"),
    "OfSteps": ("threes", "float_threes"),
    "InBranches": ("evens", "turns"),
    "Named": ("iteration", "step_counter"),
    "Replaced": (),
    "OfUnknownShape": (),
    "Silent": (),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return processes.outcome(tmp_path_factory.mktemp("own_state"), HERE / "own_state.py", limit=120)[0]


@pytest.mark.parametrize("kind", [*SUMS, "Python"])
@pytest.mark.parametrize("mode", ["rounds", "in_turn"])
def test_without_overlap_it_is_one_devices(seen, mode, kind):
    one, many = seen["one_device"][kind], seen[mode][kind]
    for name, value in one.items():
        if name == "loss":
            np.testing.assert_allclose(many[name], value, rtol=1e-6)
        else:
            assert many[name] == value, name


@pytest.mark.parametrize("kind", SUMS)
def test_workers_at_once_lose_no_addition(seen, kind):
    one, many = seen["one_device"][kind], seen["free"][kind]
    for name in ("iterations", *SUMS[kind]):
        assert many[name] == one[name], name


def test_what_is_replaced_is_what_one_step_has_assigned(seen):
    found = seen["free"]["Replaced"]
    assert found["rows"] in (8, 11)
    assert found["copy"] in ([8.0] * 6, [11.0] * 6)


def test_only_what_the_examples_decide_keeps_workers_from_sharing_a_batch(seen):
    assert {kind: found["divided"] for kind, found in seen["rounds"].items()} == {
        **dict.fromkeys(SUMS, False),
        "OfSteps": True,
        "Python": False,
    }


def test_workers_at_once_compute_no_gradient_of_a_python_function(seen):
    assert "max_staleness=0" in seen["free"]["Python"]["refused"]
