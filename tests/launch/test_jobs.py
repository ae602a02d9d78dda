"""Jobs that outlive their terminal: started, listed, watched from another one, stopped, and said to be dead."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import limits
import psutil
import pytest

from toolkit.cli.main import main
from toolkit.errors import JobStopped, TaskFailed
from toolkit.launch import Job, JobSpec, jobs
from toolkit.launch.queues.slurm import QUEUE as SLURM
from toolkit.launch.record import Record

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", os.environ["RANK"], flush=True), sys.exit(143)))
print("begun", os.environ["RANK"], flush=True)
if sys.argv[1:] == ["raise"]:
    raise ValueError("no such column")
while not os.path.exists("finish"):
    time.sleep(0.05)
print("finished", os.environ["RANK"])
"""


class User:
    """Somebody at several terminals."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}

    def start(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "toolkit", *arguments],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments, limit=60):
        process = self.start(*arguments)
        try:
            return process.communicate(timeout=limit)[0], process.returncode
        finally:
            process.kill()
            process.wait()

    def detach(self, *more):
        """The id of a job that was started."""
        said, code = self.run("launch", "--detach", "--workers=2", "--grace=3", "train.py", *more)
        assert code == 0, said
        return re.search(r"launch: job (\S+) runs; logs in", said)[1]

    def entry(self, job):
        return json.loads((self.folder / "state" / "toolkit" / "jobs" / f"{job}.json").read_text())

    def until(self, *command, shows, limit=30):
        deadline = time.monotonic() + limits.patient(limit)
        while shows not in (said := self.run(*command)[0]):
            assert time.monotonic() < deadline, said
        return said


@pytest.fixture
def user(tmp_path):
    made = User(tmp_path)
    yield made
    for file in (tmp_path / "state").glob("toolkit/jobs/*.json"):
        try:
            supervisor = psutil.Process(json.loads(file.read_text())["pid"])
            left = [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_job_goes_on_without_its_terminal_and_is_watched_from_another(user):
    job = user.detach()
    assert re.search(rf"{job} +running .*train.py", user.run("jobs")[0])
    user.until("logs", job, shows="begun 1")
    watching = user.start("attach", "--show=all")  # The newest.
    following = user.start("logs", job[:12], "-f", "--task=worker:1")
    time.sleep(1)
    (user.folder / "finish").touch()
    said = watching.communicate(timeout=30)[0]
    assert (watching.returncode, following.wait(30)) == (0, 0)
    assert "begun 0" in said
    assert "worker:1 | finished 1" in said
    launchers = next(user.folder.glob("runs/*/launcher.log")).read_text()
    assert "launch: done" in launchers
    assert "begun" not in launchers, "the tasks' own logs have that"
    assert re.search(r"^launch: done in \d+ s; logs in ", said, re.MULTILINE)
    lines = following.communicate()[0]
    assert "worker:1 | begun 1" in lines
    assert "worker:0" not in lines
    assert re.search(rf"{job} +done ", user.run("jobs")[0])


@pytest.mark.slow
def test_a_job_is_stopped_with_its_checkpoint(user):
    job = user.detach()
    user.until("logs", job, shows="begun 1")
    assert user.run("stop", job) == (f"Job {job}: stopped\n", 0)
    assert "saved 1" in user.run("logs")[0]
    said, code = user.run("attach", job)
    assert (code, "Stopped by SIGTERM; all tasks have ended." in said) == (143, True)
    assert re.search(rf"{job} +stopped ", user.run("jobs")[0])


@pytest.mark.slow
def test_who_leaves_leaves_it_running(user):
    job = user.detach()
    watching = user.start("attach", job)
    time.sleep(1.5)
    watching.send_signal(signal.SIGINT)
    said = watching.communicate(timeout=20)[0]
    assert watching.returncode == 130
    assert f"Stopped by SIGINT; job {job} runs on, and `toolkit stop {job}` ends it." in said
    assert psutil.pid_exists(user.entry(job)["pid"])


@pytest.mark.slow
def test_a_job_that_fails_says_so_to_whoever_asks(user):
    said, code = user.run("launch", "--detach", "--workers=1", "train.py", "raise")
    job = re.search(r"job (\S+) runs", said)[1] if code == 0 else user.run("jobs")[0].split()[3]
    said, code = user.run("attach", job)
    assert code == 1
    assert "worker:0 failed first: it ended with exit code 1" in said
    assert "ValueError: no such column" in said
    assert re.search(rf"{job} +exit code 1 ", user.run("jobs")[0])


@pytest.mark.slow
def test_what_cannot_be_started_is_said_at_once(user):
    said, code = user.run("launch", "--detach", "--workers=2", "nope.py")
    assert code == 2
    assert "error: launch starts the script nope.py, but there is no such file" in said
    said, code = user.run("launch", "--detach", "--workers=2", "--show=worker:7", "train.py")
    assert (code, "the tasks started here are worker:0, worker:1" in said) == (2, True)


@pytest.mark.first
@pytest.mark.fault
@pytest.mark.slow
def test_a_supervisor_that_is_killed_leaves_no_task_and_a_job_that_is_dead(user):
    job = user.detach()
    user.until("logs", job, shows="begun 1")
    watching = user.start("attach", job)
    time.sleep(1)
    supervisor = psutil.Process(user.entry(job)["pid"])
    tasks = supervisor.children(recursive=True)
    supervisor.kill()
    gone, alive = psutil.wait_procs(tasks, timeout=15)
    assert alive == []
    assert len(gone) >= 2
    said = watching.communicate(timeout=20)[0]
    assert (watching.returncode, f"Job {job} is dead: its launcher on" in said) == (1, True)
    assert re.search(rf"{job} +dead ", user.run("jobs")[0])
    assert user.run("stop", job) == (f"Job {job} had ended already: dead\n", 0)


@pytest.mark.slow
def test_after_a_reboot_it_is_dead_whoever_has_its_number(user, monkeypatch):
    job = user.detach()
    monkeypatch.setenv("XDG_STATE_HOME", str(user.folder / "state"))
    assert jobs.find(job).state() == "running"
    monkeypatch.setattr(jobs, "_BOOT", user.folder / "another boot")
    assert jobs.find(job).state() == "dead"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(user.folder / "state"))
    file = user.folder / "state" / "toolkit" / "jobs" / f"{job}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": 1.0}))
    assert jobs.find(job).state() == "dead"


@pytest.mark.slow
def test_a_job_that_is_none_is_said(user):
    for command in ("logs", "attach", "stop"):
        said, code = user.run(command, "20260101")
        assert (code, "job '20260101' was asked for, but no such job is known on this machine" in said) == (2, True)
    assert user.run("jobs") == ("No job has been launched here.\n", 0)


def test_of_the_jobs_that_are_over_the_newest_fifty_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ended, running, elsewhere = (tmp_path / name for name in ("ended", "running", "elsewhere"))
    for logs in (ended, running):
        logs.mkdir()
    jobs.add(Record(running / "runs"), pid=os.getpid())
    jobs.add(Record(elsewhere / "of-another-host"))
    file = tmp_path / "state" / "toolkit" / "jobs" / "of-another-host.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "another"}))
    for number in range(53):
        record = Record(ended / f"over-{number:02}")
        record.directory.mkdir()
        record.end(None)
        jobs.add(record)
    assert [job.id for job in jobs.every()] == ["runs", "of-another-host", *(f"over-{n:02}" for n in range(2, 53))]


def listed(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        main(["jobs", *flags])
    said = capsys.readouterr()
    return said.out + said.err, ended.value.code


def test_what_is_over_is_forgotten_when_it_is_asked_or_its_directory_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {}
    for name, pid in (("dead", ended.pid), ("gone", ended.pid), ("runs", os.getpid()), ("runs too", os.getpid())):
        record = Record.begin(JobSpec(command=("x.py",), log_dir=str(tmp_path / name)))
        names[name] = jobs.add(record, pid=pid).id
    for name in ("gone", "runs too"):
        shutil.rmtree(jobs.find(names[name]).directory)
    text, _ = listed(capsys)
    assert [names[name] in text for name in ("dead", "gone", "runs", "runs too")] == [True, False, True, True]
    assert names["gone"] not in [job.id for job in jobs.every()]
    said, code = listed(capsys, "--forget", names["runs"])
    assert (code, "it is running" in said) == (2, True)
    assert listed(capsys, "--forget") == ("Forgot 1 job\n", 0)
    assert {job.id for job in jobs.every()} == {names["runs"], names["runs too"]}


@pytest.mark.slow
def test_jobs_that_share_a_directory_for_logs_are_told_apart(user):
    ids = []
    for more in (["raise"], []):
        (user.folder / "finish").touch()
        said, code = user.run("launch", "--log_dir=../same/../logs", "--workers=1", "train.py", *more)
        assert code == (1 if more else 0), said
        ids.append(sorted(user.folder.glob("state/toolkit/jobs/*.json"), key=os.path.getmtime)[-1].stem)
    listed = user.run("jobs")[0]
    assert re.search(rf"{ids[0]} +exit code 1 ", listed), listed
    assert re.search(rf"{ids[1]} +done ", listed), listed
    assert [user.run("attach", job)[1] for job in ids] == [1, 0]
    assert "begun 0" in user.run("logs", "../logs")[0], "the newest job in the directory as it was named"
    assert "begun 0" in user.run("logs", f"../logs/launch-{ids[1]}")[0], "its own directory"


@pytest.mark.slow
def test_jobs_of_slurm_on_a_machine_without_its_commands(user, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(user.folder / "state"))
    record = Record(user.folder / "logs" / "20260101-000000-abcd")
    record.directory.mkdir(parents=True)
    jobs.add(record, queue="slurm", number="4711")
    user.environ["PATH"] = str(user.folder)
    said, code = user.run("jobs")
    assert (code, "on Slurm, Slurm 4711" in said) == (0, True), said
    for command in ("stop", "attach", "stacks"):
        said, code = user.run(command, record.id)
        assert (code, "there is no scontrol on this machine" in said) == (2, True), said


def test_a_slurm_job_that_somebody_stopped_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(SLURM, "reachable", lambda: True)
    monkeypatch.setattr(SLURM, "state", lambda _: ("CANCELLED", 0))
    record = Record(tmp_path / "20260101-000000-abcd")
    record.directory.mkdir()
    entry = jobs.add(record, queue="slurm", number="4711")
    record.end(JobStopped(15))
    with pytest.raises(JobStopped, match="Stopped by SIGTERM; all tasks have ended"):
        Job(entry).follow(lines=10)


def test_stop_does_not_wait_for_slurm_to_clean_up_a_node_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(SLURM, "reachable", lambda: True)
    monkeypatch.setattr(SLURM, "stop", lambda _: None)
    monkeypatch.setattr(SLURM, "state", lambda _: ("COMPLETING", 0))
    record = Record(tmp_path / "launch-20260101-000000-abcd")
    record.directory.mkdir()
    assert Job(jobs.add(record, queue="slurm", number="4711")).stop() == "completing"


def test_what_a_job_that_never_began_has_written_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(SLURM, "reachable", lambda: True)
    monkeypatch.setattr(SLURM, "state", lambda _: ("FAILED", 127))
    record = Record(tmp_path / "20260101-000000-abcd")
    record.directory.mkdir()
    (record.directory / "job.log").write_text("/opt/python: No such file or directory\n")
    jobs.add(record, queue="slurm", number="4711")
    with pytest.raises(SystemExit) as ended:
        main(["logs", record.id])
    assert (ended.value.code, capsys.readouterr().out) == (0, "/opt/python: No such file or directory\n")
    with pytest.raises(TaskFailed, match="exit code 127.*\n.*wrote last:\n  /opt/python: No such file"):
        Job(jobs.find(record.id)).follow(lines=10)


def test_attach_takes_the_tasks_to_show_as_launch_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record = Record(tmp_path / "launch-20260101-000000-abcd")
    record.directory.mkdir()
    record.add("attempt", number=1, tasks=["worker:0", "worker:1"])
    for number in range(2):
        record.log(f"worker:{number}", 1).write_text(f"line {number}\n")
    record.add("end", code=0, text="launch: done", stopped=False)
    jobs.add(record)
    for show, lines in (("none", 0), ("worker:0,worker:1", 2), ("all", 2)):
        with pytest.raises(SystemExit) as ended:
            main(["attach", record.id, f"--show={show}"])
        assert (ended.value.code, capsys.readouterr().out.count("| line ")) == (0, lines)
    with pytest.raises(SystemExit):
        main(["attach", record.id, "--show=worker:7"])
    assert "error: what worker:7 wrote, but the tasks are worker:0, worker:1. Name one" in capsys.readouterr().err


def test_a_job_that_ends_as_it_is_asked_to_is_stopped_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record = Record(tmp_path / "launch-20260101-000000-abcd")
    record.directory.mkdir()
    entry = jobs.add(record, pid=os.getpid())

    def gone(*_):
        monkeypatch.setattr(jobs.Entry, "runs", False)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    assert Job(entry).stop() == "dead"


def test_another_machine_of_the_same_name_has_jobs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    entry = jobs.add(Record(tmp_path / "a"), pid=os.getpid())
    assert entry.state() == "running"
    monkeypatch.setattr(jobs, "_MACHINE", tmp_path / "another machine-id")
    (tmp_path / "another machine-id").write_text("0123")
    assert (entry.state(), entry.over) == (f"on {entry.host}", False)
    assert not Job(entry).done()


@pytest.mark.slow
def test_where_the_tasks_of_a_running_job_are(user):
    job = user.detach()
    user.until("logs", job, shows="begun 1")
    said, code = user.run("stacks", job)
    assert code == 0, said
    assert re.search(r"--- worker:1 ---\n.*train.py\", line \d+", said, re.DOTALL), said
    assert "No task is inside TensorFlow: worker:0 at train.py, line" in said
    assert re.search(rf"{job} +running ", user.run("jobs")[0])
    assert user.run("stop", job)[1] == 0
    said, code = user.run("stacks", job)
    assert (code, f"`toolkit stacks {job}` asks where its tasks are, but the job is stopped" in said) == (2, True), said


@pytest.mark.slow
def test_stop_means_the_job_that_runs(user):
    job = user.detach()
    user.until("logs", job, shows="begun 1")
    (user.folder / "end.py").touch()
    assert user.run("launch", "--workers=1", "end.py")[1] == 0
    said, code = user.run("stop", "")
    assert (code, "no such job is known on this machine" in said) == (2, True), said
    assert user.run("stop") == (f"Job {job}: stopped\n", 0)
    assert user.run("stop", job) == (f"Job {job} had ended already: stopped\n", 0)


@pytest.mark.slow
def test_a_job_of_another_directory_is_listed_last_and_never_taken_without_its_id(user):
    job = user.detach()
    user.until("logs", shows="begun 1")
    listed = user.run("jobs")[0]
    assert re.search(rf"^Started in this directory:\n  job .*\n  {job}  running +\d+ s  .*train.py\n", listed)
    assert re.search(r"^    worker:0 is process \d+, worker:1 is process \d+$", listed, re.MULTILINE)
    here, user.folder = user.folder, user.folder / "other"
    user.folder.mkdir()
    for command in ("stop", "logs", "attach", "stacks"):
        said, code = user.run(command)
        assert code == 2, said
        assert f"you have started none in this directory; the newest, {job}, was started in {here}" in said
    (user.folder / "end.py").touch()
    assert user.run("launch", "--workers=1", "end.py")[1] == 0
    listed = user.run("jobs")[0]
    assert re.search(rf"^Started in this directory:\n.*\n.*end.py\nStarted elsewhere:\n.*\n  {job} .*{here}: ", listed)
    assert "had ended already: done" in user.run("stop")[0]
    assert user.run("stop", job)[0] == f"Job {job}: stopped\n"


@pytest.mark.slow
def test_a_job_that_is_not_listed_any_more_is_found_by_its_directory(user):
    (user.folder / "say.py").write_text("print('said')")
    user.run("launch", "--log_dir=logs", "--workers=1", "say.py")
    for file in user.folder.glob("state/toolkit/jobs/*.json"):
        file.unlink()
    assert user.run("logs", "logs") == ("worker:0 | said\n", 0)
