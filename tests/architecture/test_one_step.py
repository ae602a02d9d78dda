"""The way of one training step, as CONTRIBUTING.md tells it: whoever follows it opens these files and no others."""

import pathlib
import re
import sys

import keras
import numpy as np
import pytest

import toolkit
from toolkit import strategies

ROOT = pathlib.Path(toolkit.__file__).parent.parent
PASSES_ON = {"toolkit/support/wrapping.py"}  # It hands a call on to what wraps it, and knows nothing of steps.


def named_in_contributing():
    section = re.search(r"## One step of training\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    return set(re.findall(r"`(toolkit/[\w/]+\.py)`", section.partition("Around it")[0]))


@pytest.mark.slow
def test_a_step_enters_the_files_that_contributing_names(four_devices):
    entered = set()

    def note(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "toolkit"):
            entered.add(str(path.relative_to(ROOT)))

    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    step = model.train_step

    def watched(data):
        sys.setprofile(note)  # Of this thread: each replica's step is traced in one of its own.
        try:
            return step(data)
        finally:
            sys.setprofile(None)

    model.train_step = watched
    model.fit(np.ones((8, 3), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)
    assert entered - PASSES_ON == named_in_contributing()
