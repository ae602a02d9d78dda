"""A job that outlives its terminal: the same supervisor, in a session of its own.

    python -m toolkit.launch.detached LOGS

is what supervises it: LOGS/job.json says what was asked.
"""

import pathlib
import subprocess
import sys
import time

from toolkit.errors import LaunchError, TaskFailed, ToolkitError
from toolkit.launch.here import new_job_id, run_here
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records import jobs
from toolkit.launch.records.record import Record, log_directory

__all__ = ["start"]

_TICK = 0.05


def start(spec: JobSpec) -> tuple[str, pathlib.Path]:
    """Starts a job in a session of its own; returns its id and the directory of its logs when its tasks are started.

    Raises:
        LaunchError: What was asked can't be done.
        TaskFailed: Its supervisor ended at once.
    """
    logs, job_id = log_directory(spec.log_dir), new_job_id()
    record = Record(logs)
    record.new()
    record.start_job(spec, job_id)
    with open(logs / "launcher.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.launch.detached", str(logs.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    jobs.add(job_id, logs, pid=process.pid)
    while True:
        found = record.new()
        if end := next((event for event in found if event["event"] == "end" and event["code"]), None):
            process.wait()
            if "asked" in end:
                raise LaunchError(asked=end["asked"], found=end["found"], remedy=end["remedy"])
            raise TaskFailed(end["text"], code=end["code"])
        if any(event["event"] in ("started", "end") for event in found):
            process.returncode = 0  # Nobody waits for it here.
            return job_id, logs
        if process.poll() is not None:
            raise TaskFailed(f"The job's supervisor ended at once; see {logs / 'launcher.log'}", code=1)
        time.sleep(_TICK)


def _main() -> int:
    logs = pathlib.Path(sys.argv[1])
    job = Record(logs).job()
    try:
        run_here(job["spec"], job_id=job["id"], logs=logs)
    except ToolkitError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
