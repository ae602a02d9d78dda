"""Training that ends in NaN keeps its good checkpoints, ends, and says so."""

import io
import itertools
import json
import sys
import time

import keras
import numpy as np
import pytest

from toolkit.errors import CheckpointsFailing, Diverged
from toolkit.training import Checkpoint, CheckpointStore, Run

EPOCHS, STEPS = 4, 3


def train(directory, data, *, resume=False, every=0, extra=()):
    with Run(directory, recipe="test", resume=resume, checkpoint_steps=every) as run:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        run.fit(model, data, epochs=EPOCHS, steps_per_epoch=STEPS, callbacks=extra)
        return run.summary


def batches(*, bad=()):
    """Batches without end, some of which hold a NaN."""
    for step in itertools.count(1):
        x = np.random.default_rng(step).normal(size=(4, 2))
        if step in bad:
            x[1, 1] = np.nan
        yield x, np.ones((4, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "noticed", "good"), [(0, 6, 3), (2, 6, 4)])
def test_it_ends_at_the_next_checkpoint_and_the_good_ones_are_kept(tmp_path, every, noticed, good):
    said = rf"after step {noticed}, 2 of 2 weights.*/kernel.*is step {good} in"
    with pytest.raises(Diverged, match=said) as end:
        train(tmp_path / "run", batches(bad=[5]), every=every)
    assert end.value.exit_code == 1
    assert CheckpointStore(tmp_path / "run/checkpoints").load().step == good
    text = (tmp_path / "run/summary.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["status"] == "diverged"
    assert not (tmp_path / "run/model.keras").exists()
    # With the bad example mended, it goes on from there.
    assert train(tmp_path / "run", batches(), resume=True)["resumed_from_step"] == good


@pytest.mark.slow
def test_before_the_first_checkpoint(tmp_path):
    with pytest.raises(Diverged, match="there is no checkpoint yet"):
        train(tmp_path / "run", batches(bad=[1]))
    assert CheckpointStore(tmp_path / "run/checkpoints").names() == []


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_null_in_the_summary(tmp_path):
    class NoLoss(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = float("nan")

    train(tmp_path / "run", batches(), extra=[NoLoss()])
    assert json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=pytest.fail)["loss"] is None
    rows = CheckpointStore(tmp_path / "run/checkpoints").load().metadata["history"]
    assert [row["loss"] for row in rows] == [None] * 4


def test_infinity_in_what_json_can_not_hold_and_what_a_store_keeps(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(Checkpoint(step=1, arrays={}, metadata={"a": [1.5, float("inf")], "b": {"c": float("-inf")}}))
    assert store.load().metadata == {"a": [1.5, None], "b": {"c": None}}


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_checkpoints_and_the_run_only_after_the_third(tmp_path, caplog, monkeypatch):
    """As far as files of more than 300 bytes go, which is all but run.json and small ones."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(keras.callbacks.Callback):
        def __init__(self, directory, *, epochs):
            super().__init__()
            self.directory, self.epochs = directory, epochs

        def on_epoch_end(self, epoch, logs=None):
            full = epoch in self.epochs
            for _ in range(300 if epoch == self.epochs[0] else 0):  # The first checkpoint is written meanwhile.
                if CheckpointStore(self.directory / "checkpoints").names():
                    break
                time.sleep(0.1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300 if full else before[0], before[1]))

    monkeypatch.setattr(sys, "stdout", io.StringIO())  # The file that pytest puts there could fill up, too.
    try:
        summary = train(tmp_path / "two", batches(), extra=[Full(tmp_path / "two", epochs=(1, 2))])
        assert summary["status"] == "completed"
        assert caplog.text.count("The checkpoint of step") == 2, caplog.text
        assert caplog.text.count("TensorBoard's files can't be written (") == 1, caplog.text
        assert CheckpointStore(tmp_path / "two/checkpoints").names() == ["step-00000003-end", "step-00000012-end"]
        with pytest.raises(CheckpointsFailing, match="3 checkpoints in a row"):
            train(tmp_path / "three", batches(), extra=[Full(tmp_path / "three", epochs=(1, 2, 3))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert CheckpointStore(tmp_path / "three/checkpoints").load().step == 3
    assert train(tmp_path / "three", batches(), resume=True)["steps"] == 12
