"""What steps of one's own return and assign beside parameter servers: one device's where steps don't overlap."""

import pathlib
import re

import numpy as np
import processes
import pytest
import served_steps
import test_logs

pytestmark = pytest.mark.slow
HERE = pathlib.Path(__file__).parent
LOGS = [f"logs {name}" for name in test_logs.LOGS]
KINDS = [*served_steps.KINDS, "a schedule", "a scaled loss", "clips", *LOGS]
# What the chief would have to know before it applies a round, and what needs the whole batch.
WHOLE = {
    "a rate by the step",
    "a rate that decays",
    "a constant rate",
    "a rate for the next step",
    "its own steps",
    "a scaled loss",  # Whether the round counts isn't known when its step asks for their number.
    "clips",
    "logs counts by class",  # A bincount checks the largest of its classes.
    "logs the largest",
    "logs a root",
    "logs whether any",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return processes.outcome(tmp_path_factory.mktemp("own_steps"), HERE / "served_steps.py", limit=240)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["rounds", "in_turn"])
def test_without_overlap_it_is_one_devices(seen, mode, kind):
    one, many = seen[0]["one_device"][kind], seen[0][mode][kind]
    assert set(many) - set(one) == {"divided"}
    for name, value in one.items():
        if name == "text":
            assert many[name] == value
        else:
            np.testing.assert_allclose(many[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_workers_share_a_batch_unless_the_step_needs_more_than_its_share(seen):
    assert {kind: found["divided"] for kind, found in seen[0]["rounds"].items()} == {
        kind: kind not in WHOLE for kind in KINDS
    }


def test_a_step_that_sets_the_rate_is_named_with_it(seen):
    assert re.search(r"can't be divided among workers: it assigns sgd\w*/learning_rate", seen[1])
