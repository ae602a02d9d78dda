"""Functions in the place of scripts: from Python, and from the cells of a real notebook."""

import os
import signal
import threading
import time

import nbclient
import nbformat
import processes
import pytest

from toolkit import launch
from toolkit.errors import JobStopped, LaunchError, TaskFailed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(processes.ROOT))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


def ranked(factor):
    rank = int(os.environ["RANK"])
    if factor == 9 and rank == 1:
        raise ValueError("no such column")
    return factor * rank


@pytest.mark.slow
def test_each_tasks_result_comes_back_in_order():
    assert launch.run(ranked, 10, workers=3) == [0, 10, 20]


@pytest.mark.slow
def test_the_first_failure_is_raised_with_its_task_and_its_cause():
    with pytest.raises(TaskFailed, match="worker:1 failed first") as failed:
        launch.run(ranked, 9, workers=2)
    assert "ValueError: no such column" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.slow
def test_what_cannot_be_sent_is_said():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="it or its arguments can't be pickled"):
        launch.run(ranked, lock, workers=1)
    with pytest.raises(TaskFailed, match="a lock can't be pickled"):
        launch.run(threading.Lock, workers=1)
    with pytest.raises(LaunchError, match="--workers=.*no number|-1 tasks of job worker"):
        launch.run(ranked, 1, workers=-1)


@pytest.mark.slow
def test_ctrl_c_ends_the_tasks(tmp_path):
    def wait():
        open("begun", "w").close()
        time.sleep(100)

    def press():
        while not os.path.exists("begun"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(JobStopped):
        launch.run(wait, workers=1, grace=2.0)


CELLS = [
    "import os, keras, numpy as np, toolkit\n"
    "UNITS = 3\n"
    "def train(epochs):\n"
    "    import toolkit\n"
    "    strategy = toolkit.strategies.create('multi_worker')\n"
    "    with strategy.scope():\n"
    "        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(UNITS, kernel_initializer='ones')])\n"
    "        model.compile('sgd', 'mse')\n"
    "    model.fit(np.ones((8, 2)), np.ones((8, UNITS)), batch_size=4, epochs=epochs, verbose=0)\n"
    "    return model.get_weights()[0]",
    "first, second = toolkit.launch.run(train, 2, workers=2)\nprint('SAME', (first == second).all(), first.shape)",
    "import threading, _thread, time\n"
    "threading.Timer(2, _thread.interrupt_main).start()\n"  # As the stop button does.
    "try:\n"
    "    toolkit.launch.run(time.sleep, 60, workers=1, grace=1.0)\n"
    "except toolkit.errors.JobStopped as error:\n"
    "    print('STOPPED', error)",
]


@pytest.mark.slow
def test_a_notebooks_own_functions_train(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "SAME True (2, 3)" in text[1]
    assert "launch: done in" in text[1], "the launcher's lines are the cell's output"
    assert "STOPPED Stopped by SIGINT; all tasks have ended." in text[2]
