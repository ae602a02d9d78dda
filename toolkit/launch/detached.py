"""Runs a job that outlives its terminal: the same supervisor, in its own session.

    python .../alone.py toolkit.launch.detached DIRECTORY

is what supervises it: job.json in the job's own directory says what was asked.
"""

import dataclasses
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch import alone
from toolkit.launch.display import output
from toolkit.launch.here import run_here
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records import jobs
from toolkit.launch.records.jobs import Entry
from toolkit.launch.records.record import LAUNCHER_LOG, Record
from toolkit.support import signals

__all__ = ["start"]

_TICK = 0.05


def start(spec: JobSpec, record: Record | None = None) -> Entry:
    """Starts a job in its own session, and returns when its tasks have started.

    Args:
        spec: What is asked.
        record: What has been begun of it; None for a new one.

    Raises:
        LaunchError: What was asked can't be done.
        TaskFailed: Its supervisor ended at once.
        JobStopped: This process received a signal before; the job is ended.
    """
    record = record or Record.begin(spec)
    with open(record.directory / LAUNCHER_LOG, "ab") as log:
        process = subprocess.Popen(
            alone.command("toolkit.launch.detached", str(record.directory.absolute())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    entry = jobs.add(record, pid=process.pid)
    with signals.recorded() as received:
        _wait_for_tasks(process, record, received)
    return entry


def _wait_for_tasks(process: subprocess.Popen, record: Record, received: Sequence[int]) -> None:
    """Waits until its tasks have started, and meanwhile shows its supervisor's messages."""
    begun = False
    while True:
        found = record.new()
        begun = begun or any(event["event"] == "attempt" for event in found)
        for each in found:
            if each["event"] == "note" and not begun:  # For example, for which hosts it waits.
                output.say(each["text"])
        if received:  # The user doesn't know its id yet.
            process.terminate()
            process.wait()
            raise JobStopped(received[0])
        if end := next((event for event in found if event["event"] == "end" and event["code"]), None):
            process.wait()
            if "asked" in end:
                raise LaunchError(asked=end["asked"], found=end["found"], remedy=end["remedy"])
            raise TaskFailed(end["text"], code=end["code"])
        if any(event["event"] in ("started", "end") for event in found):
            threading.Thread(target=process.wait, daemon=True).start()  # Or a notebook reaps child processes.
            return
        if process.poll() is not None:
            last_lines = record.beginnings().splitlines()[-1:] or ["nothing, and perhaps the disk is full"]
            raise TaskFailed(
                f"The job's launcher ended at once, with exit code {process.returncode}. "
                f"It wrote to {record.directory / LAUNCHER_LOG}: {last_lines[0]}",
                code=1,
            )
        time.sleep(_TICK)


def _main() -> int:
    record = Record(pathlib.Path(sys.argv[1]))
    try:
        spec: JobSpec = record.job()["spec"]
        # The logs hold the output of tasks; this file holds the launcher's own messages.
        run_here(dataclasses.replace(spec, show=spec.show or ("none",)), record)
    except ToolkitError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
