"""What the batch script runs in the allocation: srun, and a requeue where that helps.

    python -m toolkit.launch.backends.slurm.batch --max_restarts=N --tasks=chief:1,worker:2 --logs=DIR -- -m MODULE ...

Slurm itself queues the job again when its first node fails. This does so when the job's time was nearly up, for which
tasks were asked to write a checkpoint and ended with 143; when another node no longer answers; and when the job
failed, up to --max_restarts times. Tasks that are started again go on from their checkpoint.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys

from toolkit.cluster.sources.ranks import TASKS
from toolkit.errors import RequestError
from toolkit.support import signals, status

__all__: list[str] = []

_CHILD = ("-m", "toolkit.launch.child", os.devnull)  # As tasks are started locally.
_ANSWER = 20  # Seconds.
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
    with signals.recorded((signal.SIGTERM, signal.SIGINT)) as received:  # scancel; srun gets its own.
        code = _srun(given, job, restarts)
        _say(f"srun ended with exit code {code}")
        if received or code in (0, RequestError.exit_code):
            return code
        if code == 128 + signal.SIGTERM:
            return _requeue(job, code, "its time was nearly up")
        if not _nodes_answer():
            return _requeue(job, code, "a node doesn't answer")
        failures = _count(given.logs / _FAILURES)
        if failures <= given.max_restarts:
            return _requeue(job, code, f"it failed, restart {failures} of {given.max_restarts}")
        return code


def _srun(given: argparse.Namespace, job: str, restarts: int) -> int:
    environ = {
        **os.environ,
        status.RESUME: "1",
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
    return subprocess.run(
        ["srun", "--kill-on-bad-exit=1", *logs, sys.executable, *_CHILD, str(int(given.as_is)), *command],
        env=environ,
        check=False,
    ).returncode


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
    number = 1 + (int(file.read_text()) if file.exists() else 0)
    file.write_text(str(number))
    return number


def _say(text: str) -> None:
    sys.stdout.write(f"toolkit: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(_main())
