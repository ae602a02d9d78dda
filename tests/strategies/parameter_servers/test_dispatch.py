"""Work on its way to workers and back, with threads in the place of workers."""

import random
import threading
import time

import pytest
import tensorflow as tf

from toolkit.cluster import Cluster
from toolkit.errors import TaskLost
from toolkit.strategies.parameter_servers import dispatch
from toolkit.strategies.parameter_servers.dispatch import Dispatch, Dispatcher

CLUSTER = Cluster(
    {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4"], "ps": ["127.0.0.1:5"]}
)


class Coordinator:
    """Gives work to three threads, and raises what it raised when asked whether it is done, or given more."""

    def __init__(self):
        self.error = None
        self.threads = []
        self.free = threading.Semaphore(3)

    def done(self):
        if self.error:
            error, self.error = self.error, None
            raise error

    def take(self, work):
        self.done()
        self.threads.append(threading.Thread(target=self.run, args=[work]))
        self.threads[-1].start()

    def run(self, work):
        with self.free:
            try:
                work()
            except Exception as error:
                self.error = self.error or error  # The first one, as TensorFlow's.


@pytest.fixture
def dispatcher(monkeypatch):
    coordinator = Coordinator()
    monkeypatch.setattr(dispatch.internals, "schedule", lambda c, work: c.take(work))
    monkeypatch.setattr(dispatch.internals, "worker_index", lambda: 0)
    monkeypatch.setattr(dispatch, "answers", lambda *_: True)
    yield Dispatcher(coordinator, CLUSTER)
    for thread in coordinator.threads:
        thread.join(10)


@pytest.mark.parametrize("staleness", [None, 0, 1, 2, 5, 9])
@pytest.mark.parametrize("steps", [1, 3])
def test_no_step_overlaps_with_more_steps_of_others_than_allowed(dispatcher, staleness, steps):
    """Each step reads a version, takes its time, and is applied: what is counted is what was applied in between."""
    if staleness is not None and 0 < staleness < steps:
        pytest.skip("the session sends no dispatch as long as that")
    chance = random.Random(4)
    lock, version, ages, order = threading.Lock(), [0], [], []

    def run(attempt):
        assert attempt == 1
        for _ in range(steps):
            with lock:
                read = version[0]
            time.sleep(chance.random() * 0.004)
            with lock:
                ages.append(version[0] - read)
                version[0] += 1
        return version[0]

    for _ in range(60):
        dispatcher.send(Dispatch(steps, run, order.append), staleness=staleness)
    dispatcher.wait_for_all()
    assert len(order) == 60
    assert version[0] == 60 * steps
    if staleness is not None:
        assert max(ages) <= staleness
    if staleness != 0:
        assert max(ages) > 0  # They did run beside one another.


def test_an_error_of_a_step_reaches_whoever_waits(dispatcher):
    def fails(_):
        raise tf.errors.InvalidArgumentError(None, None, "a shape")

    dispatcher.send(Dispatch(1, fails, print), staleness=None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a shape"):
        dispatcher.wait_for_all()
    order = []
    dispatcher.send(Dispatch(1, lambda _: 1, order.append), staleness=0)
    dispatcher.wait_for_all()
    assert order == [1]


def raising(error):
    def raises(*_):
        raise error

    return raises


ERRORS = {
    "of the user's": ValueError("mine"),
    "as of a lost task": tf.errors.UnavailableError(None, None, "mine"),
    "as of a step that was given up": tf.errors.CancelledError(None, None, "mine"),
    "that ends a program": SystemExit("mine"),
}


@pytest.mark.parametrize("of", ["run", "done"])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_workers_thread_raises_ends_the_wait(dispatcher, monkeypatch, error, of):
    monkeypatch.setattr(dispatch, "_QUIET", 0.3)
    given = {"run": lambda _: 1, "done": print, of: raising(error)}
    dispatcher.send(Dispatch(1, **given), staleness=None)
    assert raised_in_time(dispatcher.wait_for_all) is error
    assert raised_in_time(dispatcher.wait_for_all) is None


def test_an_error_that_comes_between_two_sends_ends_with_the_second(dispatcher):
    error = ValueError("mine")
    dispatcher.send(Dispatch(1, raising(error), print), staleness=None)
    dispatcher._coordinator.threads[0].join(10)
    assert raised_in_time(lambda: dispatcher.send(Dispatch(1, lambda _: 1, print), staleness=None)) is error
    assert raised_in_time(dispatcher.wait_for_all) is None


def test_a_worker_that_is_lost_afterwards_hides_no_error(dispatcher, monkeypatch):
    """TensorFlow gives its work to no other worker, because of the error."""
    monkeypatch.setattr(dispatch, "_QUIET", 0.3)
    error = ValueError("mine")
    for each in (error, tf.errors.UnavailableError(None, None, "lost")):
        work = Dispatch(1, raising(each), print)
        dispatcher._under_way.append(work)
        dispatcher._coordinator.run(lambda work=work: dispatcher._execute(work))
    assert raised_in_time(dispatcher.wait_for_all) is error


def raised_in_time(function):
    """What a function raises within seconds, None for nothing; fails if it goes on waiting."""
    found = []

    def run():
        try:
            function()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it still waits"
    return found[0]


def test_a_lost_ps_is_named(dispatcher, monkeypatch):
    monkeypatch.setattr(dispatch, "answers", lambda _, task: task.job != "ps")

    def fails(_):
        raise tf.errors.UnavailableError(None, None, "connection reset")

    dispatcher.send(Dispatch(1, fails, print), staleness=None)
    with pytest.raises(TaskLost, match=r"has lost ps:0 .*--resume"):
        dispatcher.wait_for_all()


def test_without_workers_it_does_not_wait_for_ever(dispatcher, monkeypatch):
    monkeypatch.setattr(dispatch, "answers", lambda _, task: task.job != "worker")
    monkeypatch.setattr(dispatch, "_QUIET", 0.1)
    monkeypatch.setattr(dispatch, "_NO_WORKER", 0.5)
    release = threading.Event()
    dispatcher.send(Dispatch(1, lambda _: release.wait(20), print), staleness=None)
    with pytest.raises(TaskLost, match="All 3 workers"):
        dispatcher.wait_for_all()
    release.set()


@pytest.mark.slow
def test_workers_that_come_back_one_by_one_are_not_waited_for_for_ever(dispatcher, monkeypatch):
    """TensorFlow takes none of them back before all are there."""
    workers = [str(task) for task in dispatcher.cluster.tasks if task.job == "worker"]
    gone = set(workers)
    monkeypatch.setattr(dispatch, "answers", lambda _, task: str(task) not in gone)
    monkeypatch.setattr(dispatch, "_QUIET", 0.1)
    monkeypatch.setattr(dispatch, "_NO_WORKER", 1)
    release = threading.Event()
    dispatcher.send(Dispatch(1, lambda _: release.wait(20), print), staleness=None)
    threading.Timer(0.5, gone.discard, [workers[0]]).start()
    with pytest.raises(TaskLost, match="All 3 workers were lost"):
        dispatcher.wait_for_all()
    release.set()
