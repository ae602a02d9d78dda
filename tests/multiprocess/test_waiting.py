"""A signal to a process that waits for its peers ends it at once, with 128 + its number and one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import limits
import preloaded
import processes
import pytest

from toolkit.launch.agent.tasks import CHILD

MEET = """
import os
from toolkit.cluster import require, wait_for_tasks
me = require(os.environ)
wait_for_tasks(me.cluster, me.task, timeout=100)
"""
PLAIN = """
import toolkit
toolkit.strategies.create("auto")
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS = 10  # That an end may take on a busy machine; it is some tenths of one.


def start(command, port, folder, out):
    workers = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    with out.open("wb") as file:
        return preloaded.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(processes.ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps(config),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def end(process, out, number, limit=100):
    """Waits until it waits, signals it, and returns its exit code and what it wrote after that."""
    try:
        deadline = time.monotonic() + limits.patient(limit)
        while "waiting for worker:1" not in out.read_text():
            assert process.poll() is None, out.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = len(out.read_text())
        process.send_signal(number)
        return process.wait(SECONDS), out.read_text()[before:].strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_while_tasks_wait_for_one_another(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    kinds = [
        *((["-c", MEET], number, "while waiting for worker:1") for number in SIGNALS),
        (["-m", "recipes.cifar_multi_worker", "--run_dir=run"], signal.SIGTERM, "at once; checkpoints .* are kept"),
        (["train.py"], signal.SIGTERM, "while waiting for worker:1"),
        (["train.py"], signal.SIGINT, "while waiting for worker:1"),
        ([CHILD, "stacks", "0", "train.py"], signal.SIGTERM, "while waiting for worker:1"),
    ]
    started = []
    try:
        for number, (command, _, _) in enumerate(kinds):
            out = tmp_path / f"out{number}"
            started.append((start(command, 23861 + 2 * number, tmp_path, out), out))
        for (process, out), (command, number, said) in zip(started, kinds, strict=True):
            code, text = end(process, out, number)
            assert code == 128 + number, (command, text)
            assert re.fullmatch(f"Stopped by {number.name} {said}\\.", text), (command, text)
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
