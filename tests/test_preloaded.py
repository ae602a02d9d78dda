"""A program that is forked from one with TensorFlow imported can't tell, but for what is imported already."""

import json
import os
import signal
import sys

import preloaded
import processes
import pytest

PROGRAM = """
import json, os, signal, sys
mask = os.umask(0)
shown = open("/proc/self/environ").read().split(chr(0))
print(json.dumps([
    sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd(), __name__, mask, "SAID=it's" in shown, os.environ["SAID"],
    str(signal.getsignal(signal.SIGTERM)), str(signal.getsignal(signal.SIGINT)), sys.stdin.read(),
    os.getppid(), os.getpgid(0), sorted(os.listdir("/proc/self/fd"))[:3], sys.stdout.line_buffering,
]))
sys.stderr.write("to stderr")
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-c", "script"])
def test_it_finds_what_it_would_have_found(tmp_path, monkeypatch, way):
    (tmp_path / "it.py").write_text(PROGRAM)
    command = ["-c", PROGRAM] if way == "-c" else ["it.py"]
    seen = []
    for forks in (True, False):
        monkeypatch.setattr(preloaded, "forks", forks)
        done = processes.python(tmp_path, *command, "a b", "", SAID="it's", limit=100)
        seen.append((done.returncode, done.stderr, json.loads(done.stdout)))
    assert seen[0] == seen[1]
    assert seen[0][0] == 7


@pytest.mark.slow
def test_it_is_this_processs_child_and_ends_by_a_signal(tmp_path):
    with preloaded.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        start_new_session=True,
    ) as process:
        assert os.getpgid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
