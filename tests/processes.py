"""Groups of processes that train together, started as by hand, with a hard limit and an end."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import limits
import preloaded
import psutil
import pytest

from toolkit import devices
from toolkit.launch.agent.ports import ENVIRONMENT, HeldPorts

ROOT = pathlib.Path(__file__).parent.parent


class Group:
    """Processes of one cluster of workers on this machine.

    Attributes:
        processes: One Popen each, standard output and error going to files.
        outputs: What each wrote, once they have ended.
    """

    def __init__(self, command, arguments, folder, ports, environment):
        self.files = [folder / f"worker-{number}.out" for number in range(len(arguments))]
        self.processes = []
        workers = [f"127.0.0.1:{port}" for port in ports]
        for number, own in enumerate(arguments):
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": number}}
            added = {"TF_CONFIG": json.dumps(config), **ENVIRONMENT, **threads(len(workers))} if workers else {}
            with self.files[number].open("wb") as out:
                self.processes.append(
                    preloaded.Popen(
                        [sys.executable, *command, *own],
                        env={
                            **os.environ,
                            "PYTHONPATH": str(ROOT),
                            "TF_CPP_MIN_LOG_LEVEL": "3",
                            "PYTHONUNBUFFERED": "1",
                            **added,
                            **environment,
                        },
                        cwd=folder,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                    )
                )

    @property
    def outputs(self):
        return [file.read_text(errors="replace") for file in self.files]

    def wait(self, *, limit):
        """The exit codes, None for those still running after `limit` seconds."""
        deadline = time.monotonic() + limits.patient(limit)
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(0.05)
        return [process.poll() for process in self.processes]

    def succeed(self, *, limit):
        deadline = time.monotonic() + limits.patient(limit)
        while time.monotonic() < deadline and not any(p.poll() for p in self.processes):
            if all(p.poll() == 0 for p in self.processes):
                return self.outputs
            time.sleep(0.05)
        time.sleep(1)
        shown = "\n".join(f"--- worker {n}\n{text[-3000:]}" for n, text in enumerate(self.outputs))
        raise AssertionError(f"exit codes {[p.poll() for p in self.processes]} in {limit} s\n{shown}")

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


def threads(tasks):
    """The variables by which the launcher divides this machine's cores; the last digits of sums depend on them."""
    each = str(max(1, devices.cores() // tasks))
    return {"OMP_NUM_THREADS": each, "TF_NUM_INTRAOP_THREADS": each}


@contextlib.contextmanager
def group(command, arguments, folder, *, cluster=True, ports=None, **environment):
    """Starts one process for each of `arguments`, as worker 0, 1, ...; ends them all.

    Args:
        command: What follows the interpreter for all of them, such as ["train.py"].
        arguments: What follows that, for each.
        folder: Their working directory.
        cluster: Whether they are a cluster, or a process that knows of none.
        ports: Of the workers; free ones, held for them, unless given.
        environment: Added to theirs.
    """
    with HeldPorts() as held:
        if ports is None:
            ports = [held.free() for _ in arguments] if cluster else []
        running = Group([str(part) for part in command], arguments, pathlib.Path(folder), ports, environment)
        try:
            yield running
        finally:
            running.close()


class Job:
    """A launched job whose tasks can be found and killed."""

    LIMIT = 60  # Seconds to wait for something, unless said.

    def __init__(self, folder, flags, command, *, environ=None, before=()):
        given = environ or {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.folder = folder
        self.log = folder / "launch.out"
        with self.log.open("wb") as out:
            self.process = preloaded.Popen(
                [
                    *(*before, sys.executable, "-m", "toolkit", "launch", "--show=all"),
                    *(f"--log_dir={folder / 'logs'}", *flags, *command),
                ],
                env=given,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    def until(self, pattern, *, limit=None):
        """Waits for a line, or for something that holds."""
        limit = limit or self.LIMIT
        holds = pattern if callable(pattern) else lambda: re.search(pattern, self.text)
        deadline = time.monotonic() + limits.patient(limit)
        while not holds():
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < deadline, f"no {pattern!r} in {limit} s\n{self.text[-3000:]}"
            time.sleep(0.02)

    def kill(self, task, number=signal.SIGKILL):
        """Sends a task a signal, the last one unless another is given; returns when."""
        agents = psutil.Process(self.process.pid).children()
        (found,) = [child for agent in agents for child in agent.children() if self._is(child, task)]
        found.send_signal(number)
        return time.monotonic()

    def _is(self, process, task):
        with contextlib.suppress(psutil.Error):
            return process.environ().get("TOOLKIT_STATUS", "").startswith(f"{task}@")
        return False

    def wait(self, *, limit):
        return self.process.wait(limit)


# Words that a shell, or whatever lies between, would read otherwise; and a script that tells what came of them.
ODD = ["it's", "$(touch ran)", "`touch ran`", "a\nb", "--leading", "a b;c&d", "ünïcode €", '"', "%s%t", "*", "~", "\\"]
TELL = """
import json, os, sys
json.dump([sys.argv[1:], os.environ['ODD'], os.getcwd()], open(f'told{os.environ["RANK"]}.json', 'w'))
"""
ODD_ENV = f"--env=ODD={''.join(ODD)}"


def wait_for(found, process, *, limit):
    """Waits until something is there, such as a checkpoint, while a process runs that is to bring it."""
    deadline = time.monotonic() + limits.patient(limit)
    while not found():
        assert time.monotonic() < deadline, f"not in {limit} s"
        assert process.poll() is None, f"ended with {process.returncode}"
        time.sleep(0.05)


def told(folder, tasks=2):
    """Whether every task was given the words as they are, in this directory; and nothing was run on the way."""
    found = [json.loads((folder / f"told{number}.json").read_text()) for number in range(tasks)]
    return found == [[ODD, "".join(ODD), str(folder)]] * tasks and not list(folder.rglob("ran"))


SERVED = ("--chief", "--workers=2", "--ps=2")
FEW = ("--chief", "--workers=1", "--ps=1")  # Each task takes seconds of a core to import TensorFlow.


def python(folder, *arguments, limit=200, **environment):
    """Runs a program to its end, in a folder, its output captured."""
    return preloaded.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        timeout=limit,
        cwd=folder,
    )


def outcome(folder, script, limit):
    """What a program that takes the name of a file writes there, in JSON; its second stream."""
    ended = python(folder, str(script), "out.json", limit=limit)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "out.json").read_text()), ended.stderr


def launch(folder, *arguments, tasks=("--workers=2",), limit=200):
    """Runs `toolkit launch` to its end, in a folder."""
    every = () if any(each.startswith("--show") for each in (*tasks, *arguments)) else ("--show=all",)
    return python(folder, "-m", "toolkit", "launch", *every, *tasks, *arguments, limit=limit)


def launch_apart(folder, *arguments, limit=200):
    """Runs `toolkit launch` as `launch` does, in a network of its own: by SECURITY.md's own line."""
    line = re.search(r"^ +(unshare .*) toolkit launch ", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)[1]
    words = shlex.split(line)
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces can be made here")
    return subprocess.run(
        [*words, sys.executable, "-m", "toolkit", "launch", "--show=all", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def seen(done):
    """What each of two workers printed behind SEEN, as JSON, in a job that came to its end."""
    assert done.returncode == 0, done.stdout[-2500:] + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, _, text = line.partition(" | SEEN ")
        if text:
            found[name] = json.loads(text)
    return [found["worker:0"], found["worker:1"]]
