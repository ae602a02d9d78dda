"""The way of one training step, as CONTRIBUTING.md tells it: whoever follows it opens these files and no others."""

import pathlib
import re

import processes
import pytest

import toolkit

ROOT = pathlib.Path(toolkit.__file__).parent.parent
# They hand calls on: to what wraps a function, to a function within a step, to losses and metrics that are of examples.
PASSES_ON = {"toolkit/support/wrapping.py", "toolkit/strategies/step/inlining.py"}
PASSES_ON |= {
    f"toolkit/strategies/step/{name}.py"
    for name in ("layer_losses", "kinds", "results", "shown", "trial", "tape", "whole_batch", "xla")
}
PASSES_ON |= {"toolkit/strategies/variables/outside.py"}
# In a process of its own: what other tests have wrapped would be entered, too.
PROGRAM = f"""
import pathlib, sys
import keras
import numpy as np
import toolkit

toolkit.devices.configure(gpus=2, emulate="always")
entered = set()

def note(frame, event, _):
    path = pathlib.Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to({str(ROOT / "toolkit")!r}):
        entered.add(str(path.relative_to({str(ROOT)!r})))

with toolkit.strategies.create("mirrored").scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
step = model.train_step

def watched(data):
    sys.setprofile(note)  # Of this thread: each replica's step is traced in one of its own.
    try:
        return step(data)
    finally:
        sys.setprofile(None)

watched.__func__ = step.__func__  # Keras's own, which hands gradients on as they are.
model.train_step = watched
model.fit(np.ones((8, 3), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)
print(*sorted(entered))
"""


def named_in_contributing():
    section = re.search(r"## One step of training\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    return set(re.findall(r"`(toolkit/[\w/]+\.py)`", section.partition("Around it")[0]))


@pytest.mark.slow
def test_a_step_enters_the_files_that_contributing_names(tmp_path):
    done = processes.python(tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) - PASSES_ON == named_in_contributing()
