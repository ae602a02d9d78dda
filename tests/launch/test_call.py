"""Functions in the place of scripts: from Python, and from the cells of a real notebook."""

import os
import signal
import subprocess
import sys
import threading
import time

import limits
import nbclient
import nbformat
import processes
import pytest

from toolkit import launch
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import jobs
from toolkit.launch.backends import queued
from toolkit.launch.record import Record


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
def test_the_cause_is_raised_though_a_thread_of_the_function_goes_on():
    def kept(rank):
        if int(os.environ["RANK"]) == rank:
            threading.Thread(target=time.sleep, args=(1000,)).start()
            raise ValueError("no such column")
        time.sleep(1000)

    with pytest.raises(TaskFailed, match="worker:1 failed first") as failed:
        launch.run(kept, 1, workers=2, stall_timeout=0.0, grace=1.0)
    assert (failed.value.exit_code, str(failed.value.__cause__)) == (1, "no such column")


@pytest.mark.slow
def test_what_cannot_be_sent_is_said():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="it or its arguments can't be pickled"):
        launch.run(ranked, lock, workers=1)
    with pytest.raises(TaskFailed, match="a lock can't be pickled"):
        launch.run(threading.Lock, workers=1)
    with pytest.raises(LaunchError, match="--workers=-1, but it must be 0 or more"):
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
    with pytest.raises(KeyboardInterrupt, match="Stopped by SIGINT; all tasks have ended"):
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
    "except KeyboardInterrupt as error:\n"
    "    print('STOPPED', error)",
    "job = toolkit.launch.submit(train, 2, workers=2)\n"
    "print('RESULTS', job.results(120)[0].shape, job.state)\n"
    "late = toolkit.launch.submit(time.sleep, 60, workers=1, grace=1.0)\n"
    "print('THEN', late.state, late.stop(), toolkit.launch.Job(late.id) == late)",
]


@pytest.mark.slow
def test_a_notebooks_own_functions_train(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "SAME True (2, 3)" in text[1]
    assert "launch: done in" in text[1], "the launcher's lines are the cell's output"
    assert "STOPPED Stopped by SIGINT; all tasks have ended." in text[2]
    assert text[3] == "RESULTS (2, 3) done\nTHEN running stopped True\n"


def test_what_python_gives_is_taken_or_named(tmp_path):
    spec = launch.JobSpec(command=("x",), env={"A": 1}, log_dir=tmp_path, show=["worker:0"])
    assert (spec.env, spec.log_dir, spec.show) == (("A=1",), str(tmp_path), ("worker:0",))
    for wrong, said in (
        ({"workers": "2"}, "workers='2', but that is a str. Give a whole number"),
        ({"workers": True}, "workers=True, but that is a bool. Give a whole number"),
        ({"workers": 0}, "--workers=0, but there is no chief either"),
        ({"chief": 1}, "chief=1, but that is a int. Give True or False"),
        ({"env": "A=1"}, "env='A=1', but that is a str. Give a list of texts, or a dict"),
        ({"rate": 0.1}, "rate= is given to a launcher, but a launcher has no such option"),
        ({"on": "kubernetes"}, "prints a manifest for a script, and starts nothing itself"),
    ):
        with pytest.raises(LaunchError) as error:
            launch.Launcher(**wrong)
        assert said in str(error.value)


@pytest.mark.slow
def test_arguments_by_name_are_the_functions_and_what_was_printed_comes_first():
    code = (
        "import numpy as np, toolkit\nprint('before')\n"
        "def train(*, workers, big): return workers, np.zeros(big, 'u1')\n"
        "(first, _), (second, large) = toolkit.launch.Launcher(workers=2).run(train, workers=7, big=3 << 20)\n"
        "print(first, second, large.size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("before\nlaunch: 2 tasks here")
    assert done.stdout.endswith(f"7 7 {3 << 20}\n")


@pytest.mark.slow
def test_a_job_is_followed_stopped_and_read(tmp_path):
    def train(rate):
        sys.stdout.write(f"rate {rate}\n")
        sys.stdout.flush()
        while not os.path.exists("finish"):
            time.sleep(0.05)
        return rate * int(os.environ["RANK"])

    job = launch.submit(train, 3, workers=2)
    assert (job.state, job.done()) == ("running", False)
    with pytest.raises(TimeoutError, match=f"Job {job.id} hasn't ended within 0.2 s; it goes on"):
        job.wait(0.2)
    deadline = time.monotonic() + limits.patient(20)
    while not all("rate 3" in job.logs(f"worker:{number}") for number in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "in train" in job.stacks()["worker:0"]
    assert [each.id for each in jobs.every()] == [job.id]
    again = launch.Job(job.id[:17])
    (tmp_path / "finish").touch()
    assert again.results(timeout=30) == [0, 3]
    assert repr(job) == f"<Job {job.id}: done>"
    (tmp_path / "finish").unlink()
    stopped = launch.submit(train, 1, workers=1, grace=1.0)
    assert stopped.stop() == "stopped"
    with pytest.raises(JobStopped):
        stopped.results()
    with pytest.raises(LaunchError, match="what worker:7 wrote, but the tasks are worker:0"):
        stopped.logs("worker:7")


@pytest.mark.slow
def test_a_submitted_job_that_fails_raises_what_the_function_raised(tmp_path):
    job = launch.submit(ranked, 9, workers=2)
    with pytest.raises(TaskFailed, match="worker:1 failed first") as failed:
        job.results(timeout=60)
    assert isinstance(failed.value.__cause__, ValueError)
    (tmp_path / "train.py").write_text("import sys; print('script', sys.argv[1:])")
    script = launch.Launcher(workers=1, log_dir=tmp_path / "logs").submit(tmp_path / "train.py", "--epochs", 5)
    assert script.results(timeout=60) == [None]
    assert script.logs() == "script ['--epochs', '5']\n"
    assert script.directory.parent == tmp_path / "logs"


def test_a_job_that_python_waits_for_is_listed_and_stopped_without_its_python(tmp_path):
    record = Record(tmp_path / "20260101-000000-abcd")
    record.directory.mkdir()
    entry = jobs.add(record, pid=os.getpid())
    assert entry.alive
    record.end(None)
    assert (entry.state(), entry.alive) == ("done", False), "this process lives on"


class Odd(Exception):
    def __init__(self, code, words):
        super().__init__(f"{code}: {words}")


def odd():
    raise Odd(7, "seven")


@pytest.mark.slow
def test_what_cannot_be_called_is_said_before_anything_starts(tmp_path):
    for function, given, said in (
        ("train.py", (), "'train.py' is to run in the job's tasks, but it can't be called. "),
        (None, (), "None is to run in the job's tasks, but it can't be called. "),
        (ranked, (), "missing a required argument: 'factor'"),
        (ranked, (1, 2), "too many positional arguments"),
    ):
        with pytest.raises(LaunchError) as error:
            launch.run(function, *given, workers=1)
        assert said in str(error.value)
    with pytest.raises(LaunchError, match="that is no function or script"):
        launch.submit(7, workers=1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_exception_that_cannot_be_sent_is_there_in_words_and_nothing_is_left(tmp_path):
    with pytest.raises(TaskFailed) as failed:
        launch.run(odd, workers=1)
    assert "Odd: 7: seven" in str(failed.value.__cause__)
    assert "test_call.py" in str(failed.value), "the function's own file is named"
    assert launch.run(ranked, 1, workers=1) == [0]
    assert not [*tmp_path.rglob("call.pkl"), *tmp_path.rglob("results")]


@pytest.mark.slow
def test_a_module_that_launches_when_it_is_imported_does_so_once(tmp_path):
    (tmp_path / "job.py").write_text(
        "import toolkit\ndef f(): return 1\nopen('imported', 'a').write('x')\nprint(toolkit.launch.run(f, workers=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", "import job"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "a task of another job is importing its function, and that import launches it again" in done.stderr
    assert 'Put what launches under `if __name__ == "__main__":`' in done.stderr
    assert (tmp_path / "imported").read_text() == "xx"


@pytest.mark.slow
def test_a_launcher_in_a_thread_is_not_ended_by_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.launch.job._ANSWER", 0.5)
    results = []
    thread = threading.Thread(target=lambda: results.extend(launch.run(time.sleep, 3, workers=1)))
    thread.start()
    deadline = time.monotonic() + limits.patient(20)
    while not (known := jobs.every()) or not known[0].record.log("worker:0", 1).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(LaunchError, match="its launcher hasn't answered for 0.5 s"):
        launch.Job(known[0].id).stacks()
    thread.join(30)
    assert results == [None]


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGHUP, True), (signal.SIGTERM, False)])
def test_a_function_stays_for_a_slurm_job_that_runs_on(tmp_path, monkeypatch, number, kept):
    def submit(spec, *, follow, record):
        raise JobStopped(number)

    monkeypatch.setattr(queued, "submit", submit)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        launch.Launcher(on="slurm", nodes=1).run(os.getpid)
    assert bool(list(tmp_path.rglob("call.pkl"))) == kept
