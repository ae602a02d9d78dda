"""From a request to a job that runs."""

import itertools
import os
import pathlib
import secrets
import socket
import sys
import tempfile
import time
from typing import Any

from toolkit.errors import LaunchError, RequestError, TaskFailed
from toolkit.launch.request import Request
from toolkit.support import signals, status

__all__ = ["dry_run", "start"]


def start(request: Request, *, display: Any = None, ports: Any = None, where: str = "") -> None:
    """Starts the tasks, shows what they do, and returns when all are done.

    Args:
        request: What to do.
        display: Shows what the tasks do, as `display.Display`; None for this program's standard output.
        where: Where the tasks are, to be said: "in a network of their own".
        ports: A HeldPorts with those that are this job's already; None for none.

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
    from toolkit.launch.logs import log_directory
    from toolkit.launch.ports import HeldPorts

    mark = secrets.token_hex(8)
    with (
        signals.recorded() as received,
        ports or HeldPorts() as held,
        tempfile.TemporaryDirectory(prefix="toolkit-", dir=_short(), ignore_cleanup_errors=True) as scratch,
    ):
        cluster, mine = tasks.describe(request, held)
        _check_only(request, mine)
        address = os.path.join(scratch, "status")
        began = request.began or f"{time.strftime('%Y%m%d-%H%M%S')}-{mark[:4]}"
        environ = {**os.environ, **dict(request.environment)}
        planned = tasks.plan(request, cluster, mine, mark=mark, status_path=address, began=began, environ=environ)
        logs = log_directory(request.log_dir, [task.file_name for task in planned])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(address)
            listening.setblocking(False)
            if display is None:
                display = Display(mine, tee=request.tee, only=request.only)
                others = f", {len(cluster.tasks) - len(mine)} elsewhere" if len(mine) < len(cluster.tasks) else ""
                display.say(f"launch: {len(mine)} tasks here{others}{' ' * bool(where)}{where}; logs in {logs}")
            budget = Budget(request.max_restarts, window=request.restart_window)
            try:
                for attempt in itertools.count(request.attempt):
                    job = Job(
                        planned,
                        mark=mark,
                        environ={**environ, status.ATTEMPT: str(attempt), status.LOGS: str(logs.absolute())},
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
                        signals.sleep(budget.delay, received)
            finally:
                display.close()


def dry_run(request: Request) -> list[str]:
    """Returns a line for a shell for each task, with its environment and command but for secrets; starts nothing.

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
        return [tasks.shell_line(task, os.environ) for task in planned]


def _check_only(request: Request, mine: tuple) -> None:
    names = [str(task) for task in mine]
    for name in request.only:
        if name not in names:
            raise LaunchError(
                asked=f"--only={name} shows that task's lines",
                found=f"the tasks started here are {', '.join(names[:12])}",
                remedy="Name one of them",
            )


def _short() -> str | None:
    """A Unix socket's path holds about 100 characters; a longer temporary directory is passed over."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 and sys.platform != "win32" else None
