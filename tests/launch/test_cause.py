"""Who is named where several tasks failed, and what is said of those that had ended before."""

import signal

import pytest

from toolkit.cluster import Task
from toolkit.launch.agent.connection import Lateness
from toolkit.launch.supervisor import state


@pytest.fixture
def task(tmp_path):
    all_made = []

    def make(index, *events):
        made = state.TaskState(Task("worker", index), host="", log=tmp_path / f"worker-{index}.log")
        made.take({"event": "started", "pid": 7})
        for event in events:
            made.take(event)
        all_made.append(made)
        return made

    yield make
    for made in all_made:
        made.output.close()


def report(name, ago):
    return {"event": "report", "facts": {"state": name}, "ago": ago}


def ended(code):
    return {"event": "ended", "pid": 7, "code": code}


@pytest.mark.parametrize("code", [9, -signal.SIGKILL, -signal.SIGSEGV], ids=["os._exit(9)", "killed", "crashed"])
def test_a_sudden_end_is_the_cause_of_an_error_that_was_reported_earlier(task, code):
    follows, first = task(0, report("failed", 0.5), ended(1)), task(1, ended(code))
    assert state.cause([follows, first]) is first


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGTERM], ids=["aborted by TensorFlow", "asked to end"])
def test_an_abort_follows_from_an_error_that_was_reported_earlier(task, code):
    first, follows = task(0, report("failed", 0.5), ended(1)), task(1, ended(code))
    assert state.cause([first, follows]) is first


def test_of_two_errors_the_earlier_is_the_cause(task):
    follows, first = task(0, report("failed", 0.5), ended(1)), task(1, report("failed", 0.9), ended(1))
    assert state.cause([follows, first]) is first


def test_an_event_that_was_held_up_on_its_way_is_no_later_failure(task):
    first = task(0, {**report("failed", 0.0), "late": 3.0}, {**ended(1), "late": 2.8})
    follows = task(1, report("failed", 1.0), ended(1))
    assert state.cause([first, follows]) is first


def test_how_late_an_event_is_depends_on_the_others_and_on_no_clock():
    late = Lateness()
    for second in range(5):
        assert late.of(500.0 + second, 7.0 + second + 0.02) == pytest.approx(0.0)
    assert late.of(505.0, 7.0 + 5 + 0.02 + 1.5) == pytest.approx(1.5)
    assert late.of(506.0, 7.0 + 6 + 3600) == 10, "its host was suspended"


def test_many_events_that_are_all_late_do_not_make_that_usual():
    late = Lateness()
    assert late.of(500.0, 7.0) == 0
    for event in range(1000):
        assert late.of(501.0 + event / 50, 10.0 + event / 50) == pytest.approx(2.0)


@pytest.mark.parametrize("code", [0, -signal.SIGSEGV], ids=["left", "crashed while leaving"])
def test_one_that_had_come_to_the_end_of_its_script_is_named(task, code):
    first, gone = task(0, report("failed", 0.5), ended(1)), task(1, report("ending", 9.0), ended(code))
    assert state.cause([first, gone]) is first
    words = str(state.failed_first(first, [first, gone]))
    assert "worker:0 failed first: it ended with exit code 1" in words
    assert "worker:1 had finished the script." in words


def test_a_crash_while_leaving_says_that_the_script_had_ended(task):
    only = task(0, report("ending", 9.0), ended(-signal.SIGSEGV))
    words = str(state.failed_first(only, [only]))
    assert "it was ended by SIGSEGV" in words
    assert "worker:0 had finished the script." in words


def test_the_message_says_which_checkpoint_is_the_newest_and_how_to_continue(task):
    saved = {"event": "report", "facts": {"checkpoint": 1200, "checkpoints": "runs/a/checkpoints"}, "ago": 0.5}
    first, other = task(0, ended(1)), task(1, saved, ended(1))
    words = str(state.failed_first(first, [first, other]))
    assert "The newest checkpoint, of step 1,200, is in runs/a/checkpoints. " in words
    assert 'resume="auto"' in words
    assert "checkpoint" not in state.failed_first(first, [first, other]).words, (
        "before a restart there is nothing to do"
    )
    resumes = {"event": "report", "facts": {"resumes": True}, "ago": 0.5}
    first, other = task(0, resumes, ended(1)), task(1, saved, ended(1))
    assert str(state.failed_first(first, [first, other])).endswith("To continue from it, start the job again.")


@pytest.mark.parametrize("signalled", [-signal.SIGTERM, -signal.SIGKILL, 143])
def test_one_that_was_ended_after_its_script_failed_keeps_the_scripts_exit_code(task, signalled):
    said = {"state": "failed", "exit_code": 7, "threads": ["uploads"]}
    first, other = task(0, {"event": "report", "facts": said, "ago": 20.0}), task(1)
    assert state.lingering([first], 19.0)
    assert not state.lingering([first], 21.0)
    assert not state.lingering([other], 0.0)
    for each in (first, other):
        each.asked_to_end = True
        each.take(ended(signalled))
    found = state.failed_first(first, [first, other])
    words = "worker:0 failed first: it failed with exit code 7; its thread uploads ran on and had to be ended"
    assert words in str(found)
    assert found.exit_code == 7


def test_what_another_task_was_refused_for_at_that_moment_is_said(task):
    """Whose call is the wrong one isn't known."""
    first, other, third = task(0, ended(2)), task(1, ended(2)), task(2, ended(2))
    for each, call in ((first, "fit"), (other, "evaluate"), (third, "evaluate")):
        each.output.take(f"error: {each.task} waits for the others, in {call}\n")
    words = str(state.failed_first(first, [first, other, third]))
    assert words.endswith("in fit\nworker:1 ended with:\n  error: worker:1 waits for the others, in evaluate")
    assert "ended with:" not in str(state.failed_first(other, [other, third])), "they say the same"


def test_native_notes_are_no_last_lines(task):
    only = task(0, ended(1))
    only.output.take("mine\nI0000 00:00:1795370331.375137   17060 port.cc:153] oneDNN custom operations are on.\n")
    words = str(state.failed_first(only, [only]))
    assert words.endswith(":\n  mine")
    assert state.last_lines(only) == ["mine"]


@pytest.mark.parametrize(
    ("waited", "named"),
    [
        ([(0, 9), (0, 0.5)], 1),
        ([(0, 0.5), (0, 9)], 0),
        ([(0, 9), (0, 8), (0, 0.5)], 2),
        ([(0, 9), (0, 8)], None),
        ([(0, 3), (0, 0.1)], None),
        ([(0, 9)], None),
        ([(50, 59), (50, 50.5)], 1),
    ],
    ids=["second", "first", "of three", "both wait", "not worth a word", "one", "lately"],
)
def test_who_keeps_the_others_waiting_is_told_by_how_long_each_waits(task, monkeypatch, waited, named):
    """Of 30 seconds."""
    clock = [100.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: clock[0])
    tasks = [task(number) for number in range(len(waited))]
    for moment in (0, 1):
        for each, seconds in zip(tasks, waited, strict=True):
            facts = {"state": "training", "waited": seconds[moment]}
            each.take({"event": "report", "facts": facts, "ago": 0.0})
        clock[0] += 30.0
    found = state.slowest(tasks)
    assert (found and tasks.index(found[0])) == named
    if found:
        assert found[1] == pytest.approx(min(b - a for a, b in waited if b - a > 1) / 30)
