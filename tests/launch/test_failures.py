"""The task that failed first is named with its cause, and the one that hangs with its place."""

import json
import re
import signal

import limits
import pytest


@pytest.mark.slow
def test_tasks_that_ran_alone_are_said_unless_nobody_can_know(launcher):
    said, left = (launcher.run("--workers=2", *flags, body="pass")[1] for flags in ([], ["--as_is"]))
    assert said.count("so each task runs alone") == 1
    assert "so each task runs alone" not in left
    assert "alone" not in launcher.run("--workers=1", body="pass")[1]


@pytest.mark.slow
def test_tasks_that_train_alone_are_said_while_they_do(launcher):
    body = """
from toolkit.support import status
status.report(state="training", step=1)
while not os.path.exists("go"): time.sleep(0.05)
"""
    process = launcher.start("--workers=2", body=body)
    launcher.read_until(process, b"so each task runs alone")
    (launcher.folder / "go").touch()
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    assert b"alone" not in out


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.first
@pytest.mark.versions
def test_the_first_that_fails_is_named_and_the_others_are_ended(launcher):
    code, _, err, seconds = launcher.run(
        "--workers=3", body="print('last words')\nif me == 1: sys.exit(3)\ntime.sleep(1000)"
    )
    assert code == 3
    assert "worker:1 failed first: it ended with exit code 3" in err
    assert "  last words" in err
    limits.keep(seconds, 20)
    assert launcher.nothing_left(within=1) is True


@pytest.mark.smoke
@pytest.mark.slow
def test_an_exception_shows_the_users_own_lines(launcher):
    code, _, err, _ = launcher.run("--workers=2", body="if me == 0: raise ValueError('boom')\ntime.sleep(1000)")
    assert code == 1
    assert "worker:0 failed first" in err
    assert "ValueError: boom" in err
    assert "runpy" not in err


@pytest.mark.slow
def test_the_root_cause_is_the_first_and_not_its_consequence(launcher):
    # Worker 1 fails first but takes a second to end; worker 0 is gone at once when it notices.
    body = """
import atexit, pathlib
if me == 1:
    atexit.register(time.sleep, 1)
    pathlib.Path("failing").touch()
    raise ValueError("cause")
while not os.path.exists("failing"): time.sleep(0.01)
time.sleep(0.3)
os.abort()  # As TensorFlow does where a peer is gone.
"""
    code, _, err, _ = launcher.run("--workers=2", body=body)
    assert code == 1
    assert "worker:1 failed first" in err
    assert "worker:0 was ended by SIGABRT" in err


@pytest.mark.slow
def test_a_peer_that_notices_a_killed_task_before_its_end_is_seen_is_not_the_cause(launcher):
    # A large process that is killed closes its connections first and is freed, and waited for, a while later.
    body = """
import pathlib
if me == 0:
    pathlib.Path("failing").touch()
    raise ValueError("connection reset")
while not os.path.exists("failing"): time.sleep(0.01)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err, _ = launcher.run("--workers=2", body=body)
    assert code == 137
    assert "worker:1 failed first: it was ended by SIGKILL" in err
    assert "worker:0 ended with exit code 1" in err


@pytest.mark.slow
def test_a_task_that_failed_is_ended_though_a_thread_of_its_own_goes_on(launcher):
    body = """
import threading
if me:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(1000,), name="uploads").start()
    raise ValueError("the reason")
time.sleep(1000)
"""
    flags = ("--stall_timeout=0", "--grace=1")
    code, _, err, _ = launcher.run("--workers=2", *flags, body=body)
    assert code == 1
    assert "worker:1 failed first: it failed with exit code 1; its thread uploads ran on and had to be ended" in err
    assert "ValueError: the reason" in err
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
def test_a_task_that_is_done_goes_on_in_its_threads_and_that_is_said_once(launcher):
    body = """
import threading
def upload():
    time.sleep(13)
    print("uploaded", me, flush=True)
threading.Thread(target=upload, name="uploads").start()
"""
    code, out, err, _ = launcher.run("--workers=2", "--as_is", "--grace=1", body=body)
    assert code == 0, err
    assert out.count("uploaded") == 2
    assert out.count("has finished its script, but its thread uploads still runs, and the job waits for it") == 1


@pytest.mark.slow
def test_a_hang_is_named_with_its_place(launcher):
    body = """
print("working", flush=True)
def stuck():
    time.sleep(1000)
stuck()
"""
    code, _, err, seconds = launcher.run("--workers=2", "--stall_timeout=2", "--grace=1", body=body)
    assert code == 1
    assert "No task made progress for 2 s" in err
    assert re.search(r"worker:0 at train it's.py, line \d+, in stuck; worker:1 at", err), err
    assert "most recent call first" in (launcher.logs() / "worker-1.log").read_text()
    limits.keep(seconds, 30)


@pytest.mark.slow
def test_a_task_that_stays_stopped_is_named_before_anybody_waits_for_it(launcher):
    code, _, err, seconds = launcher.run(
        "--workers=2", "--heartbeat_timeout=2", body="if me: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1000)"
    )
    assert code == 137
    assert "worker:1 failed first: it was stopped by a signal (SIGSTOP or the like)" in err
    limits.keep(seconds, 20)


@pytest.mark.slow
def test_computing_without_a_word_is_progress(launcher):
    body = "until = time.monotonic() + 7\nwhile time.monotonic() < until: pass"
    code, _, err, _ = launcher.run("--workers=1", "--stall_timeout=5", body=body)
    assert code == 0, err


@pytest.mark.slow
def test_a_module_that_is_not_there_is_the_tasks_failure(launcher):
    code, _, err, _ = launcher.run("--workers=2", command=["-m", "no.such.module"])
    assert code == 1
    assert "No module named" in err


@pytest.mark.slow
def test_a_report_of_a_tasks_child_is_not_the_tasks(launcher):
    body = """
if me == 0:
    done = subprocess.run([sys.executable, "-m", "toolkit", "tf-config", "generate"], stderr=subprocess.DEVNULL)
    print("child ended with", done.returncode, flush=True)
    time.sleep(1000)
while not os.path.exists("go"):
    time.sleep(0.05)
raise ValueError("the cause")
"""
    process = launcher.start("--workers=2", body=body)
    launcher.read_until(process, b"child ended with 2")
    (launcher.folder / "go").touch()
    _, err = process.communicate(timeout=40)
    assert b"worker:1 failed first" in err
    assert process.returncode == 1


@pytest.mark.slow
def test_a_quiet_job_is_warned_of_before_it_is_ended_and_says_where_it_hung(launcher):
    code, out, err, _ = launcher.run("--workers=2", "--stall_timeout=6", "--grace=1", body="time.sleep(100)")
    assert code == 1
    assert re.search(r"note: no task has written .* the job is ended after 6 s of that; --stall_timeout sets", out)
    assert "No task made progress for 6 s" in err
    failure = json.loads((launcher.record() / "failure.json").read_text())
    assert failure["task"] == "worker:0"
    assert "No task made progress for 6 s" in failure["words"]


@pytest.mark.slow
def test_a_crash_of_native_code_leaves_its_place(launcher):
    code, _, err, _ = launcher.run("--workers=1", body="import ctypes\nctypes.string_at(0)")
    assert code == 128 + signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in err
    assert "train it's.py" in err


@pytest.mark.slow
def test_a_module_that_is_not_there_is_not_tried_again(launcher):
    code, _, err, seconds = launcher.run("--workers=1", "--max_restarts=2", command=["-m", "no_such_module"])
    assert code == 2
    assert "launch starts the module no_such_module, but there is no such module" in err
    limits.keep(seconds, 15)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_what_the_others_make_of_a_failure_is_not_shown_before_its_cause(launcher, killed):
    body = f"""
if me:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL) if {killed} else time.sleep(1000)
print("before", flush=True)
time.sleep(0.5)
raise ValueError("the other one is gone")
"""
    _, out, err, _ = launcher.run("--workers=2", body=body)
    assert "worker:0 | before" in out
    assert ("worker:0 | Traceback" in out) is not killed
    assert ("that worker:0 wrote after worker:1 had failed: see its log" in out) is killed
    assert f"worker:{int(killed)} failed first" in err
    assert "Traceback" in (launcher.logs() / "worker-0.log").read_text()
