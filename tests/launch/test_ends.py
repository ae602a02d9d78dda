"""Signals, and ends of the launcher, of agents and of tasks: nothing is left running."""

import os
import signal
import subprocess
import time

import limits
import pytest


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_launcher_end_all_tasks(launcher, number):
    process = launcher.start("--workers=2", body="print('up', flush=True)\ntime.sleep(1000)")
    launcher.read_until(process, b"up")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"Stopped by {number.name}".encode() in err
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
def test_the_notice_of_a_cluster_has_tasks_end_as_sigterm_does(launcher):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\nprint('up', flush=True)\ntime.sleep(1000)"
    process = launcher.start("--workers=2", body=body)
    launcher.read_until(process, b"up")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert b"Stopped by SIGTERM" in err
    assert b"saved" in out + err


@pytest.mark.slow
def test_a_command_that_gives_notice_has_tasks_end_as_sigterm_does(launcher):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\nprint('up', flush=True)\ntime.sleep(1000)"
    command = f"--preempt_when=test -e '{launcher.folder}/$NOTICE'".replace("'", '"')
    process = launcher.start("--workers=2", command, "--env=NOTICE=notice", "--max_restarts=1", body=body)
    launcher.read_until(process, b"| up", times=2)
    (launcher.folder / "notice").touch()
    out, err = process.communicate(timeout=40)
    assert process.returncode == 143
    assert b"this machine is about to be taken away (--preempt_when)" in out
    assert out.count(b"saved") == 2
    assert b"Stopped by SIGTERM" in err
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "found"),
    [("no_such_program now", "a shell can't run it (exit code 127)"), ("test (", "a shell can't read it (sh: ")],
)
def test_a_command_for_notice_that_cannot_be_run_is_said(launcher, command, found):
    code, _, err, _ = launcher.run("--workers=1", f"--preempt_when={command}", body="time.sleep(1000)")
    assert code == 2
    assert f"--preempt_when='{command}' is asked whether" in err
    assert found in err


@pytest.mark.slow
def test_a_launcher_whose_parent_ignores_ends_of_children_sees_those_of_its_tasks(launcher):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # What a program is started with is inherited.
    try:
        process = launcher.start("--workers=2", body="sys.exit(3 * me)")
    finally:
        signal.signal(signal.SIGCHLD, before)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert b"worker:1 failed first: it ended with exit code 3" in err


@pytest.mark.slow
def test_a_launcher_under_nohup_goes_on_after_a_hangup(launcher):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What a program is started with is inherited.
    try:
        process = launcher.start("--workers=1", body="print('up', flush=True)\ntime.sleep(1000)")
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.read_until(process, b"up")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert b"Stopped by SIGTERM" in err


@pytest.mark.slow
def test_tasks_get_the_signal_and_time_to_save(launcher):
    body = """
def save(*_):
    time.sleep(1)
    print("saved", me, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", me, flush=True)
time.sleep(1000)
"""
    process = launcher.start("--workers=2", body=body)
    launcher.read_until(process, b"| up", times=2)
    for _ in range(2):  # As two `toolkit stop` at once do.
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert out.count(b"saved") == 2


@pytest.mark.slow
def test_a_task_that_ignores_sigterm_is_killed_after_the_grace(launcher):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif me: sys.exit(1)\ntime.sleep(1000)"
    code, _, err, seconds = launcher.run("--workers=2", "--grace=1", body=body)
    assert code == 1
    assert "worker:0 was ended by SIGKILL" in err
    limits.keep(seconds, 20)


@pytest.mark.slow
def test_killing_the_launcher_leaves_no_process(launcher):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("up", me, flush=True)
time.sleep(1000)
"""
    process = launcher.start("--workers=2", body=body)
    launcher.read_until(process, b"| up", times=2)
    assert len(launcher.left()) > 4
    process.kill()
    process.communicate(timeout=10)
    assert launcher.nothing_left(within=5) is True


@pytest.mark.slow
def test_killing_the_launcher_of_a_launcher_leaves_no_process(launcher):
    inner = "import os, time; print('deep', os.getpid(), flush=True); time.sleep(1000)"
    (launcher.folder / "inner.py").write_text(inner)
    process = launcher.start(
        "--workers=1",
        body="subprocess.run([sys.executable, '-m', 'toolkit', 'launch', '--workers=2', '--show=all', 'inner.py'])",
    )
    launcher.read_until(process, b"deep", times=2)
    process.kill()
    process.communicate(timeout=10)
    assert launcher.nothing_left(within=5) is True


@pytest.mark.slow
def test_a_grandchild_does_not_outlive_the_job(launcher):
    code, _, _, seconds = launcher.run(
        "--workers=2", body="subprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint('forked')"
    )
    assert code == 0
    limits.keep(seconds, 20)
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
def test_a_closed_terminal_ends_the_job(launcher):
    process = launcher.start("--workers=1", body="while True: print('x' * 1000, flush=True); time.sleep(0.01)")
    process.stdout.close()  # Nobody reads any more.
    deadline = time.monotonic() + limits.patient(30)
    while sum(log.stat().st_size for log in launcher.folder.glob("runs/*/worker-0.log")) < 100_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.poll() is None, "a reader that is gone is no reason to stop"
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 129
    process.stderr.close()
    assert launcher.nothing_left(within=1) is True


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(launcher, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch")
    for wait in (0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3):
        process = launcher.start("--workers=2", body="time.sleep(1000)", TMPDIR=str(scratch))
        time.sleep(wait)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)
        assert process.returncode in (143, -signal.SIGTERM), "Python itself may not have been up yet"
        assert launcher.nothing_left(within=3) is True
        assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_what_a_script_leaves_running_is_ended_and_said(launcher):
    for session in (False, True):
        body = f"subprocess.Popen(['sleep', '60'], start_new_session={session}, stdout=subprocess.DEVNULL)"
        code, out, _, _ = launcher.run("--workers=1", body=body)
        assert code == 0
        assert "note: sleep still ran when the script had ended, and was ended, too" in out
    assert launcher.nothing_left(within=5) is True


@pytest.mark.slow
def test_an_agent_that_is_killed_takes_its_tasks_along_and_is_named(launcher):
    body = """
subprocess.Popen(['sleep', '1000'], start_new_session=bool(me))
print('up', me, os.getppid(), flush=True)
time.sleep(1000)
"""
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    process = launcher.start("--workers=2", "--max_restarts=1", body=body, TMPDIR=str(temporary))
    text = launcher.read_until(process, b"| up", times=2)
    os.kill(int(text.rpartition(b"up ")[2].split()[1]), signal.SIGKILL)
    text = launcher.read_until(process, b"| up", times=2)
    assert b"The agent on this machine is gone: it was ended by SIGKILL. Its tasks were worker:0, worker:1." in text
    assert b"launch: starting the job again, restart 1 of 1" in text
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert launcher.nothing_left(within=1) is True
    assert list(temporary.glob("toolkit-*")) == []
