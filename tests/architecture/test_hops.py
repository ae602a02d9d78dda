"""How far one replica's step travels through the toolkit while it is traced: a ratchet.

A call from a function of one file to one of another is a hop. Whoever makes the way shorter sets the figures lower.
"""

import pathlib

import processes
import pytest

import toolkit

ROOT = pathlib.Path(toolkit.__file__).parent
MOST_FILES, MOST_HOPS, MOST_FOLDERS = 14, 78, 20
# In a process of its own: what other tests have wrapped would be entered, too.
PROGRAM = f"""
import pathlib, sys
import keras
import numpy as np
import toolkit

toolkit.devices.configure(gpus=2, emulate="always")
way = []

def note(frame, event, _):
    path = pathlib.Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to({str(ROOT)!r}) and frame.f_code.co_name != "<module>":
        if not way or way[-1] != path:
            way.append(path)

def fit(watch):
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
    if watch:
        model.train_step = watched
    model.fit(np.ones((8, 3), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)

fit(watch=False)  # It imports what the step needs.
fit(watch=True)
print(len(set(way)), len(way) - 1, sum(a.parent != b.parent for a, b in zip(way, way[1:])))
"""


@pytest.mark.slow
def test_a_step_stays_in_few_files(tmp_path):
    done = processes.python(tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    files, hops, folders = map(int, done.stdout.split())
    assert files <= MOST_FILES
    assert hops <= MOST_HOPS
    assert folders <= MOST_FOLDERS
