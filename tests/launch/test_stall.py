"""The limit without progress is learnt from how long steps took, and nothing is ended that none has been seen of."""

import re
import signal
import time

import pytest

from toolkit.cluster import Task
from toolkit.launch.supervisor import state

# What the launcher looks for in stacks is the place of Keras's `fit`.
TRAINER = """
import time
from toolkit.support import status
def step(kind, seconds):
    status.enter_phase(kind)
    time.sleep(seconds)
    status.enter_phase("")
def fit(*steps):
    for kind, seconds in steps:
        step(kind, seconds)
        time.sleep(0.01)
"""
SHORT = '*[("step", 0.2)] * 15'


@pytest.fixture
def trained(launcher):
    place = launcher.folder / "backend" / "tensorflow"
    place.mkdir(parents=True)
    (place / "trainer.py").write_text(TRAINER)

    def run(*flags, body):
        return launcher.run("--workers=2", "--grace=1", *flags, body=f"from backend.tensorflow import trainer\n{body}")

    return run


@pytest.mark.slow
def test_a_step_that_hangs_is_named_by_what_steps_took_so_far(trained, launcher):
    code, out, err, _ = trained("--stall_floor=4", body=f'trainer.fit({SHORT}, ("step", 1000))')
    assert code == 1
    why = r"The longest step so far took 0\.\d+ s, and 5 times that is the limit, but at least 4 s"
    said = rf"No task made progress for 4 s, so the job was stopped\. {why} \(--stall_timeout sets another\)\. "
    assert re.search(f"{said}.*trainer.py", err), err
    assert re.search(rf"{why}; the job is ended after 4 s of that; --stall_timeout sets another limit\. ", out), out
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
def test_a_machine_that_was_suspended_is_no_hang(launcher, trained):
    body = 'from backend.tensorflow import trainer\ntrainer.fit(*[("step", 0.2)] * 40)\nprint("done")'
    process = launcher.start(
        "--workers=1", "--stall_floor=3", body=body.replace("trainer.fit", "print('up'); trainer.fit")
    )
    launcher.read_until(process, b"| up")
    time.sleep(2.5)
    every = launcher.left()
    assert process.pid in [each.pid for each in every]
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        for each in every:
            each.send_signal(number)
        time.sleep(seconds)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"| done" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        'trainer.fit(("validation step", 7), ("step", 0.2))',
        'trainer.fit(("", 7), ("step", 0.2))',
        'trainer.fit(("first step of an epoch", 7))',
        'if me: trainer.fit(("saving", 7))\ntrainer.fit(("step", 7 - 6.8 * me))',
        'trainer.status.enter_phase("step")\ntime.sleep(7)',
    ],
    ids=["a first validation", "callbacks", "a first step", "the others wait for one that saves", "after an exception"],
)
def test_what_was_never_seen_may_take_longer_than_steps(trained, then):
    code, _, err, _ = trained("--stall_floor=2", body=f"trainer.fit({SHORT})\n{then}\ntime.sleep(1)")
    assert code == 0, err


KERAS = """
import keras, numpy as np
def batches():
    for number in range(50):
        if number == 41:
            time.sleep(1000)
        yield np.ones((4, 2)), np.ones((4, 1))
class Rare(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(7 if batch == 9 else 0.01)  # Less than five times --stall_floor.
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
class Slow(keras.layers.Layer):
    def call(self, x, training=False):
        import tensorflow as tf
        wait = lambda x: x if training else (time.sleep(7), x)[1]
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)
model = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=False)
test = np.ones((4, 2)), np.ones((4, 1))
model.fit(batches(), steps_per_epoch=20, epochs=3, validation_data=test, verbose=0, callbacks=[Rare()])
"""


@pytest.mark.long
@pytest.mark.slow
def test_steps_of_keras_have_a_limit_and_not_what_is_rare_between_them(launcher):
    code, out, err, _ = launcher.run("--workers=1", "--stall_floor=4", "--grace=1", limit=150, body=KERAS)
    assert code == 1
    assert out.count("| epoch ") == 2, "callbacks and the first validation took longer than steps may"
    assert re.search(
        r"The longest (first )?step .*so far took .* All tasks are inside TensorFlow. The input of worker:0", err
    ), err


@pytest.fixture
def task(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: clock[0])
    made = []

    def make(kind, longest, *, waited, cpu=5.0):
        clock[0] = 1000.0
        one = state.TaskState(Task("worker", len(made)), host="", log=tmp_path / f"{len(made)}.log")
        one.facts["state"] = "training"
        clock[0] += waited
        phase = {"kind": kind, "seconds": waited, "longest": longest}
        facts = {"memory": 0, "computes": cpu > 5, "stopped": False, "dying": False}
        one.take({"event": "sample", "cpu": cpu, "phase": phase, **facts})
        made.append(one)
        return one

    yield make
    for one in made:
        one.output.close()


def test_the_limit_is_five_times_the_longest_of_the_phase_that_takes_longest(task):
    seen = {"step": 2.0, "first step of an epoch": 400.0, "saving": 30.0}
    one, other = task("step", seen, waited=100), task("saving", seen, waited=100)
    assert state.stall([one], limit=None, floor=5.0)[:2] == (10.0, 1000.0)
    assert state.stall([one, other], limit=None, floor=5.0)[:2] == (150.0, 1000.0)
    assert state.stall([one], limit=None, floor=90.0)[0] == 90.0
    slower = task("step", {**seen, "step": 6.0}, waited=100)
    assert state.stall([one, slower], limit=None, floor=5.0)[0] == 30.0, "the slowest task's is the longest"
    compiling = task("first step of an epoch", seen, waited=100)
    assert state.stall([one, compiling], limit=None, floor=90.0)[:2] == (2000.0, 1000.0)


def test_nothing_is_learnt_of_what_was_not_seen_or_is_set(task):
    one, other = task("step", {"step": 2.0}, waited=100), task("validation step", {"step": 2.0}, waited=100)
    assert state.stall([one, other], limit=None, floor=5.0) == (1800.0, 1000.0, "")
    assert state.stall([one], limit=50.0, floor=5.0) == (50.0, 1000.0, "")
    assert state.stall([one], limit=0.0, floor=5.0) is None


def test_a_callback_has_a_limit_of_its_own_and_five_times_the_shortest(task):
    seen = {"step": 2.0, "on_epoch_end": 1.0, "on_train_batch_end": 400.0}
    one, other = task("on_epoch_end", seen, waited=100), task("waiting", seen, waited=100)
    assert state.stall([one, other], limit=None, floor=90.0)[0] == 450.0
    assert state.stall([task("on_train_batch_end", seen, waited=100)], limit=None, floor=90.0)[0] == 2000.0
    assert state.stall([task("on_test_end", seen, waited=100)], limit=None, floor=90.0)[0] == 1800.0
    assert state.stall([other], limit=None, floor=90.0)[0] == 1800.0, "nobody knows what all wait for"


def test_one_phase_is_one_standstill_however_late_a_sample_comes(task):
    one = task("step", {"step": 2.0}, waited=100)
    began = state.stall([one], limit=None, floor=5.0).last
    for late in (0.03, 0.3, 0.1):
        facts = {"memory": 0, "computes": False, "stopped": False, "dying": False, "cpu": 1.0}
        one.take({"event": "sample", "late": -late, "phase": {**one.phase, "seconds": 100.0}, **facts})
    assert state.stall([one], limit=None, floor=5.0).last == began


def test_to_report_that_one_waits_is_no_progress(task):
    one = task("waiting", {}, waited=100)
    before = one.progressed
    facts = {"task": "worker:0", "pid": 1, "waits": {"seconds": 20.0, "words": "20 s for the others"}}
    one.take({"event": "report", "facts": facts, "ago": 0.0})
    assert (one.progressed, one.waits, one.facts) == (before, facts["waits"], {"state": "training"})


def test_a_task_that_computes_only_has_the_longer_limit(task):
    one, busy = task("step", {"step": 2.0}, waited=100), task("step", {"step": 2.0}, waited=100, cpu=90.0)
    found = state.stall([one, busy], limit=None, floor=5.0)
    assert found[:2] == (10.0, 1100.0)
    busy.busy_at += 5000.0  # It goes on: a thread that waits in a loop.
    assert state.stall([one, busy], limit=None, floor=5.0) == (1800.0, 1000.0, "")
