"""Drawn models have one device's numbers on several replicas, and the check says where they don't.

    TOOLKIT_DRAWN_MODELS=1000 python -m pytest -m "slow or long" tests/strategies/check/test_drawn.py --timeout=0

tries so many.
"""

import dataclasses
import os
import warnings

import drawn
import pytest
from hypothesis import HealthCheck, given, settings

from toolkit.errors import StrategyError
from toolkit.strategies.step import trial

MODELS = int(os.environ.get("TOOLKIT_DRAWN_MODELS", "0"))


def tried(count):
    return settings(max_examples=MODELS or count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def check(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            steps = drawn.judged(model)
        except StrategyError:  # What replicas can't do is said.
            return
    for step in steps:
        assert not step.differs, f"{step.call}: {step.first}"


@pytest.mark.slow
@settings(parent=tried(4), derandomize=True)
@given(drawn.models)
def test_drawn_models_have_one_devices_numbers(model):
    check(model)


@pytest.mark.slow
@pytest.mark.long
@tried(200)
@given(drawn.models)
def test_more_drawn_models_have_one_devices_numbers(model):
    check(model)


OF_NUMBERS = drawn.Model(
    data="numbers",
    layers=(("own", "minus the mean", ""),),
    loss="classes",
    metrics=("accuracy",),
    optimizer="adam",
    step="keras",
    weighted=False,
    masks=False,
    inner="tanh",
    sequence="last",
    batch=5,
    known_size=False,
    replicas=2,
    dtype="float32",
)


@pytest.mark.slow
@pytest.mark.long
def test_squares_of_what_is_nothing_but_rounding_are_the_same():
    """Behind a batch of two that is normalised no gradient is left."""
    layers = (("batch normalisation",), ("alpha",))
    given = {"optimizer": "adafactor", "step": "sum", "weighted": True, "masks": True, "metrics": ()}
    check(dataclasses.replace(OF_NUMBERS, layers=layers, batch=2, replicas=3, dtype="float64", **given))


@pytest.mark.slow
def test_a_wrong_proof_is_found(monkeypatch):
    """What mixes examples is taken for a function by example."""
    monkeypatch.setattr(trial.Trial, "decide", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="fit: the output of .*own"):
        check(OF_NUMBERS)
