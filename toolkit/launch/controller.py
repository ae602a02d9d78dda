"""Questions and orders to Slurm's controller about a job."""

import re
import shutil
import subprocess

from toolkit.errors import LaunchError

ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT", "UNKNOWN")


def reachable() -> bool:
    """Returns whether Slurm's commands are on this machine."""
    return shutil.which("scontrol") is not None


def check(job: str) -> None:
    """Checks that Slurm's commands are here.

    Raises:
        LaunchError: Its commands aren't on this machine.
    """
    if not reachable():
        raise LaunchError(
            asked=f"Slurm is to be asked about its job {job}",
            found="there is no scontrol on this machine",
            remedy="Run this on one of Slurm's login nodes",
        )


def job_state(job: str) -> tuple[str, int]:
    """Returns a job's state in Slurm's word, and its exit code: 128 + the number of a signal that ended it."""
    done = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, check=False)
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    code = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout)
    if found is None:  # Slurm forgets a job some minutes after its end; its controller may be away for a while.
        return ("FORGOTTEN" if "Invalid job id" in done.stderr else "UNKNOWN", 0)
    number = 0 if code is None else int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
    return found[1], number


def stop(job: str) -> None:
    """Asks a job's supervisor to end it; the second time, at once. A pending job is cancelled.

    `scancel` alone would tell every process at once, and leave them Slurm's KillWait, 30 s, for a checkpoint.
    """
    subprocess.run(["scancel", "--state=PENDING", job], capture_output=True, check=False)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], capture_output=True, check=False)


def stacks(job: str) -> None:
    """Asks a job's supervisor for the tasks' Python stacks."""
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], capture_output=True, check=False)


def cancelled(job: str) -> None:
    """Cancels a job in Slurm and ends what is left of it."""
    subprocess.run(["scancel", job], capture_output=True, check=False)


def start_now(job: str) -> None:
    """Makes a job that is queued again start as soon as there is room; Slurm would wait for two minutes."""
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True, check=False)
