"""From a request to a job that runs."""

import itertools
import os
import pathlib
import secrets
import socket
import sys
import tempfile
import time

from toolkit import modes, status, stops
from toolkit.errors import JobStopped, LaunchError, RequestError, TaskFailed
from toolkit.launch.request import Request

__all__ = ["dry_run", "start"]


def start(request: Request) -> None:
    """Starts the tasks, shows what they do, and returns when all are done.

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, or no task made progress.
        JobStopped: The launcher was told to stop.
    """
    # Imported here: every task's start-up imports this package, and needs none of these.
    from toolkit.launch import tasks
    from toolkit.launch.budget import Budget
    from toolkit.launch.display import Display
    from toolkit.launch.job import Job
    from toolkit.launch.ports import HeldPorts

    mark = secrets.token_hex(8)
    with (
        stops.noted() as received,
        HeldPorts() as held,
        tempfile.TemporaryDirectory(prefix="toolkit-", dir=_short(), ignore_cleanup_errors=True) as scratch,
    ):
        cluster, mine = tasks.describe(request, held)
        _check_only(request, mine)
        address = os.path.join(scratch, "status")
        began = f"{time.strftime('%Y%m%d-%H%M%S')}-{mark[:4]}"
        planned = tasks.plan(request, cluster, mine, mark=mark, status_path=address, began=began, environ=os.environ)
        logs = _logs(request, [task.file_name for task in planned])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(address)
            listening.setblocking(False)
            display = Display(mine, tee=request.tee, only=request.only)
            others = f", {len(cluster.tasks) - len(mine)} elsewhere" if len(mine) < len(cluster.tasks) else ""
            display.say(f"launch: {len(mine)} tasks here{others}; logs in {logs}")
            budget = Budget(request.max_restarts, window=request.restart_window)
            try:
                for attempt in itertools.count(1):
                    job = Job(
                        planned,
                        mark=mark,
                        environ={**os.environ, status.ATTEMPT: str(attempt), status.LOGS: str(logs.absolute())},
                        listening=listening,
                        logs=logs,
                        scratch=pathlib.Path(scratch),
                        display=display,
                        received=received,
                        grace=request.grace,
                        stall_timeout=request.stall_timeout,
                        budget=budget,
                        whole=len(mine) == len(cluster.tasks),
                    )
                    try:
                        job.run()
                        break
                    except TaskFailed as error:
                        # What the user asked for can't be done the second time either.
                        if error.exit_code == RequestError.exit_code or not budget.take():
                            raise
                        later = f" in {budget.delay:.0f} s" if budget.delay else ""
                        display.say(f"{error}\nlaunch: starting the job again{later}, {budget.words}")
                        _sleep(budget.delay, received)
            finally:
                display.close()


def _sleep(seconds: float, received: list[int]) -> None:
    """Waits, or less where this program is told to stop; raises then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        time.sleep(0.05)
    if received:
        raise JobStopped(received[0])


def dry_run(request: Request) -> list[str]:
    """Returns a line for a shell for each task, with its exact environment and command; starts nothing.

    Raises:
        RequestError: What was asked can't be done.
    """
    from toolkit.launch import tasks
    from toolkit.launch.ports import HeldPorts

    with HeldPorts() as held:
        cluster, mine = tasks.describe(request, held)
        _check_only(request, mine)
        planned = tasks.plan(
            request, cluster, mine, mark="dry-run", status_path="/dev/null", began="dry-run", environ=os.environ
        )
        return [tasks.shell_line(task) for task in planned]


def _check_only(request: Request, mine: tuple) -> None:
    names = [str(task) for task in mine]
    for name in request.only:
        if name not in names:
            raise LaunchError(
                asked=f"--only={name} shows that task's lines",
                found=f"the tasks started here are {', '.join(names[:12])}",
                remedy="Name one of them",
            )


@modes.guarded()
def _logs(request: Request, names: list[str]) -> pathlib.Path:
    """Makes the directory for logs."""
    try:
        if request.log_dir is not None:
            logs = pathlib.Path(request.log_dir).expanduser()
            logs.mkdir(parents=True, exist_ok=True)
            for name in names:
                with open(logs / f"{name}.log", "ab"):
                    pass
            return logs
        stem = f"launch-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1000):
            logs = pathlib.Path("runs", f"{stem}-{number}" if number else stem)
            try:
                logs.mkdir(parents=True)
            except FileExistsError:
                if logs.parent.is_dir():
                    continue
                raise
            return logs
        raise FileExistsError(f"{stem} is taken a thousand times")
    except OSError as error:
        raise LaunchError(
            asked=f"the tasks' logs are to go to {request.log_dir or 'a new directory under ./runs'}",
            found=f"it can't be written ({(error.strerror or str(error)).lower()})",
            remedy="Name a directory that can be written with --log_dir",
        ) from error


def _short() -> str | None:
    """A Unix socket's path holds about 100 characters; a longer temporary directory is passed over."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 and sys.platform != "win32" else None
