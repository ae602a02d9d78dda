"""A launcher that breaks, as where its disk is full, fails the job on every host, with its cause and an end."""

import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from toolkit.errors import LaunchError, TaskFailed
from toolkit.launch import JobSpec
from toolkit.launch.backends import rendezvous
from toolkit.launch.events import ending, event, line
from toolkit.launch.record import Record
from toolkit.launch.supervisor.agents import Backend
from toolkit.launch.supervisor.supervise import supervise

ROOT = pathlib.Path(__file__).parents[2]
# Breaks a launcher, and none of the processes that it starts.
BREAKS = """
import builtins, os, subprocess

what, opens = os.environ.pop("BREAKS", ""), builtins.open

def opened(path, *args, **kwargs):
    if str(path).endswith("worker-0.log"):
        if what == "bug":
            raise ValueError("a mistake of the launcher's own")
        if what == "space":
            raise OSError(28, "No space left on device", str(path))
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        while True:  # Raises when there are no more; those taken are kept.
            os.dup(0)
    return opens(path, *args, **kwargs)

class Popen(subprocess.Popen):
    def __init__(self, *_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

if what in ("bug", "space", "descriptors"):
    builtins.open = opened
if what == "Popen":
    subprocess.Popen = Popen
"""


@pytest.fixture
def launcher(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []

    def start(name, breaks=""):
        flags = ["--show=all", "--as_is", "--nodes=2", "--workers=2", "--heartbeat_timeout=5", "--grace=1"]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "toolkit",
                "launch",
                *flags,
                f"--rendezvous={address}",
                f"--log_dir={name}",
                "train.py",
            ],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "XDG_STATE_HOME": str(tmp_path), "BREAKS": breaks},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def fail(first, second, folder, cause):
    """Whether both end with exit code 1 and say the cause, which the record's end has, too."""
    texts = [process.communicate(timeout=90)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [1, 1], texts
    for text in texts:
        assert cause in text
        assert "launch: done" not in text
    (path,) = folder.glob("first/launch-*/events.jsonl")
    end = json.loads(path.read_text().splitlines()[-1])
    assert (end["event"], end["code"], end["stopped"], cause in end["text"]) == ("end", 1, False, True), end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "cause"),
    [
        ("space", "No space left on device"),
        pytest.param("descriptors", "Too many open files", marks=pytest.mark.long),
        pytest.param("bug", "ValueError: a mistake of the launcher's own", marks=pytest.mark.long),
    ],
)
def test_the_launcher_that_supervises_breaks(launcher, tmp_path, breaks, cause):
    first = launcher("first", breaks)
    assert "1 of 2 hosts" in first.stdout.readline()
    fail(first, launcher("second"), tmp_path, cause)


@pytest.mark.slow
def test_the_launcher_that_supervises_cannot_start_its_agent(launcher):
    """Nothing is recorded of a job whose hosts never answered."""
    pair = [launcher("first", "Popen")]
    assert "1 of 2 hosts" in pair[0].stdout.readline()
    pair.append(launcher("second"))
    texts = [process.communicate(timeout=90)[0] for process in pair]
    assert [process.returncode for process in pair] == [1, 1], texts
    assert all("Resource temporarily unavailable" in text for text in texts), texts


@pytest.mark.slow
def test_a_launcher_that_has_joined_cannot_start_its_agent(launcher):
    pair = [launcher("first")]
    assert "1 of 2 hosts" in pair[0].stdout.readline()
    pair.append(launcher("second", "Popen"))
    texts = [process.communicate(timeout=90)[0] for process in pair]
    assert [process.returncode for process in pair] == [1, 1], texts
    assert all("Resource temporarily unavailable" in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.long), 1])
def test_an_agent_is_killed(launcher, tmp_path, who):
    first = launcher("first")
    assert "1 of 2 hosts" in first.stdout.readline()
    pair = [first, launcher("second")]
    for process in pair:
        while "begun" not in process.stdout.readline():
            assert process.poll() is None
    (agent,) = psutil.Process(pair[who].pid).children()
    agent.send_signal(signal.SIGKILL)
    fail(*pair, tmp_path, "SIGKILL")


class Broken(Backend):
    """A place where the first call breaks the launcher."""

    def __init__(self, error, spec):
        self.spec, self._error, self.ended = spec, error, None
        self.hosts = ()

    def cluster(self, _):
        raise self._error

    def close(self, ended):
        self.ended = ended


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (
            OSError(24, "Too many open files"),
            TaskFailed,
            "broke, and the tasks were ended: OSError: [Errno 24] Too many",
        ),
        (
            ZeroDivisionError("of a bug"),
            ZeroDivisionError,
            "broke, and the tasks were ended: ZeroDivisionError: of a bug",
        ),
        (LaunchError(asked="a", found="b", remedy="C"), LaunchError, "a, but b. C."),
    ],
)
def test_whatever_ends_a_job_is_its_end(tmp_path, error, raised, text):
    spec = JobSpec(command=("train.py",), log_dir=str(tmp_path))
    record, place = Record.begin(spec), Broken(error, spec)
    with pytest.raises(raised):
        supervise(spec, lambda: place, received=[], record=record)
    assert place.ended is error
    end = record.new()[-1]
    assert (end["event"], end["code"] > 0, text in end["text"]) == ("end", True, True), end


@pytest.mark.slow
def test_a_last_word_that_comes_together_with_the_first_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv(rendezvous.TOKEN, "a token of the test's own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def breaks(server):
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(line(event("challenge", nonce="theirs")))
            hello = next(found for found in map(json.loads, lines) if found["event"] == "hello")
            proof = rendezvous._proof(os.environ[rendezvous.TOKEN], "listener", "theirs", hello["nonce"])
            prepare = event("prepare", number=1, mark="", first=False, silence=5.0, grace=1.0)
            over = ending(OSError(28, "No space left on device"))
            connection.sendall(b"".join(map(line, (event("welcome", proof=proof), prepare, event("over", **over)))))

    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(breaks, server)
        spec = JobSpec(command=("train.py",), nodes=2, rendezvous=f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(TaskFailed, match="No space left on device"):
            rendezvous.join(spec, [])
