"""Launches real processes, of scripts that need no TensorFlow, and finds what they leave behind."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import limits
import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Each line of a script may ask for `me`, this task's index.
HEAD = 'import json, os, signal, subprocess, sys, time\nme = json.loads(os.environ["TF_CONFIG"])["task"]["index"]\n'


class Launcher:
    """Writes scripts and launches them, as a user does."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "train it's.py"  # A name that a shell would stumble over.

    def write(self, body):
        self.script.write_text(HEAD + body)
        return self.script

    def cluster_file(self, workers):
        """The flag that names a file with this cluster."""
        file = self.folder / "cluster.json"
        file.write_text(json.dumps({"cluster": {"worker": workers}}))
        return f"--cluster={file}"

    def start(self, *flags, body=None, command=None, show="all", largest_file=None, **environment):
        what = command or [str(self.write(body))]
        if show is not None and not any(flag.startswith("--show") for flag in flags):
            flags = (f"--show={show}", *flags)
        limits = ["prlimit", f"--fsize={largest_file}"] if largest_file else []
        return subprocess.Popen(
            [*limits, sys.executable, "-m", "toolkit", "launch", *flags, *what],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOOLKIT_TEST": str(self.folder), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *flags, limit=60, **how):
        """Returns exit code, standard output and error, and the seconds that it took."""
        began = time.monotonic()
        process = self.start(*flags, **how)
        try:
            out, err = process.communicate(timeout=limit)
        finally:
            process.kill()
            process.wait()
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - began

    @staticmethod
    def read_until(process, word, *, times=1):
        """Reads the launcher's output until a word has come so many times."""
        seen = b""
        deadline = time.monotonic() + limits.patient(30)
        os.set_blocking(process.stdout.fileno(), False)
        while seen.count(word) < times:
            assert time.monotonic() < deadline, seen
            seen += process.stdout.read() or b""
            time.sleep(0.02)
        os.set_blocking(process.stdout.fileno(), True)
        return seen

    def left(self):
        """Processes of this launcher's that still run: all carry its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("TOOLKIT_TEST") == str(self.folder)
                if mine and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def nothing_left(self, *, within):
        deadline = time.monotonic() + limits.patient(within)
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left == [] or left

    def logs(self):
        (folder,) = (self.folder / "runs").glob("launch-*")
        return folder

    def record(self):
        """The job's own directory, among its logs."""
        return self.logs()


@pytest.fixture
def launcher(tmp_path):
    made = Launcher(tmp_path)
    yield made
    for process in made.left():
        process.send_signal(signal.SIGKILL)
