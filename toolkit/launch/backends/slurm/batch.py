"""What the batch script runs in the allocation: srun, and a requeue where that helps.

    python -m toolkit.launch.backends.slurm.batch --max_restarts=N --tasks=chief:1,worker:2 --logs=DIR -- -m MODULE ...

Slurm itself queues the job again when its first node fails. This does so when the job's time is nearly up, of which
Slurm tells it by SIGUSR1, and it tells the tasks by SIGTERM; when another node no longer answers; and when the job
failed, up to --max_restarts times. Tasks that are started again go on from their checkpoint. How srun ends doesn't say
what happened: where one task raises, Slurm ends the others with SIGTERM, and srun returns 143. So the first task that
fails leaves failure.json, with its exit code.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from toolkit.cluster.sources.ranks import TASKS
from toolkit.errors import RequestError
from toolkit.launch.record import FAILURE
from toolkit.launch.tasks import CHILD
from toolkit.support import files, signals, status

__all__: list[str] = []

_ANSWER = 20  # Seconds.
_TICK = 0.2  # Seconds between two looks at srun.
_FAILURES = "failures"  # A file in the logs' directory: how often the job failed, over all its starts.


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_restarts", type=int, required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--logs", type=pathlib.Path, required=True)
    parser.add_argument("--start_timeout", required=True)
    parser.add_argument("--heartbeat_timeout", required=True)
    parser.add_argument("--as_is", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    job, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    failure = given.logs / FAILURE
    failure.unlink(missing_ok=True)
    with signals.recorded((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)) as received:
        code = _srun(given, job, restarts, received)
        _say(f"srun ended with exit code {code}")
        if {signal.SIGTERM, signal.SIGINT} & set(received):  # scancel; srun gets its own.
            return code
        if code and signal.SIGUSR1 in received:
            return _requeue(job, code, "its time was nearly up")
        code = _first_code(failure) or code
        if code in (0, RequestError.exit_code):
            return code
        if not _nodes_answer():
            return _requeue(job, code, "a node doesn't answer")
        failures = _count(given.logs / _FAILURES)
        if failures <= given.max_restarts:
            return _requeue(job, code, f"it failed, restart {failures} of {given.max_restarts}")
        return code


def _srun(given: argparse.Namespace, job: str, restarts: int, received: list[int]) -> int:
    environ = {
        **os.environ,
        status.JOB_ID: f"slurm-{job}",  # Run directories keep their name over restarts.
        status.ATTEMPT: str(restarts + 1),
        status.LOGS: str(given.logs),
        status.START_TIMEOUT: given.start_timeout,
        status.HEARTBEAT_TIMEOUT: given.heartbeat_timeout,
        **({TASKS: given.tasks} if given.tasks else {}),
    }
    # Slurm replaces %t by the task's rank, and %% by one %.
    logs = ["--output", str(given.logs).replace("%", "%%") + "/task-%t.log", "--open-mode=append"]
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    # A task that fails takes the others with it: they would wait for it.
    program = [sys.executable, CHILD, os.devnull, str(int(given.as_is)), *command]
    srun = subprocess.Popen(["srun", "--kill-on-bad-exit=1", *logs, *program], env=environ)
    told = False
    while srun.poll() is None:
        if signal.SIGUSR1 in received and not told:
            told = True
            _say("its time is nearly up: asking all tasks to end")
            subprocess.run(["scancel", "--signal=TERM", job], check=False)
        time.sleep(_TICK)
    return srun.returncode


def _first_code(failure: pathlib.Path) -> int:
    """The exit code of the first task that failed, as it has left it itself; 0 where none could."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(failure.read_text(encoding="utf-8"))["exit_code"])
    return 0


def _nodes_answer() -> bool:
    """Whether a program can be run on every node of the job.

    Slurm itself takes minutes to miss another node than this one: until then its failure looks like a task's.
    """
    nodes = os.environ.get("SLURM_NNODES", "1")
    command = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_ANSWER, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _requeue(job: str, code: int, why: str) -> int:
    _say(f"queueing the job again: {why}")
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        _say(f"that isn't possible: {done.stderr.strip()}")
        return code
    signal.pause()  # Slurm ends this process.
    return code


def _count(file: pathlib.Path) -> int:
    number = 1
    with contextlib.suppress(OSError, ValueError):  # A full disk leaves it empty.
        number += int(file.read_text())
    files.write_text(file, str(number))
    return number


def _say(text: str) -> None:
    sys.stdout.write(f"toolkit: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(_main())
