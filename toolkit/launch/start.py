"""Starting a job as its spec asks, attempt by attempt."""

import os
import secrets
from collections.abc import Sequence
from typing import Any

from toolkit.cluster import Task
from toolkit.errors import LaunchError
from toolkit.launch.spec import LaunchSpec, new_job_id
from toolkit.support import signals, status

__all__ = ["dry_run", "start"]


def start(spec: LaunchSpec, *, display: Any = None, ports: Any = None, where: str = "") -> None:
    """Starts the tasks, shows what they do, and returns when all are done.

    Args:
        spec: What to do.
        display: Shows what the tasks do, as `display.Display`; None for this program's standard output.
        ports: A HeldPorts with those that are this job's already; None for none.
        where: A clause for the first message: "in a network of their own".

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, or no task made progress.
        JobStopped: The launcher received a signal to stop.
    """
    # Imported here: every task's start-up imports this package, and needs none of these.
    from toolkit.launch import tasks
    from toolkit.launch.budget import Budget, attempts
    from toolkit.launch.display import Display
    from toolkit.launch.job import Job
    from toolkit.launch.ports import HeldPorts
    from toolkit.launch.record import log_directory
    from toolkit.launch.reports import Reports

    tag = secrets.token_hex(8)
    with (
        signals.recorded() as received,
        ports or HeldPorts() as held,
        Reports() as reports,
    ):
        cluster, here = tasks.to_start(spec, held)
        _check_only(spec, here)
        job_id = spec.job_id or new_job_id()
        environ = {**os.environ, **dict(spec.environment)}
        own, said = tasks.task_specs(
            spec, cluster, here, tag=tag, socket_path=reports.path, job_id=job_id, environ=environ
        )
        logs = log_directory(spec.log_dir, [task.file_name for task in own])
        if display is None:
            display = Display(here, tee=spec.tee, only=spec.only)
            others = f", {len(cluster.tasks) - len(here)} elsewhere" if len(here) < len(cluster.tasks) else ""
            display.say(f"launch: {len(here)} tasks here{others}{' ' * bool(where)}{where}; logs in {logs}")
        if said:
            display.say(said)
        budget = Budget(spec.max_restarts, window=spec.restart_window)

        def attempt(number: int) -> bool:
            Job(
                spec,
                own,
                tag=tag,
                environ={**environ, status.ATTEMPT: str(number), status.LOGS: str(logs.absolute())},
                reports=reports,
                logs=logs,
                display=display,
                received=received,
                budget=budget,
                whole=len(here) == len(cluster.tasks),
            ).run()
            return True

        try:
            attempts(attempt, first=spec.attempt, budget=budget, say=display.say, received=received)
        finally:
            display.close()


def dry_run(spec: LaunchSpec) -> list[str]:
    """Returns a line for a shell for each task, with its environment and command but for secrets; starts nothing.

    Raises:
        RequestError: What was asked can't be done.
    """
    from toolkit.launch import tasks
    from toolkit.launch.ports import HeldPorts

    with HeldPorts() as held:
        cluster, here = tasks.to_start(spec, held)
        _check_only(spec, here)
        own, said = tasks.task_specs(
            spec, cluster, here, tag="dry-run", socket_path="/dev/null", job_id="dry-run", environ=os.environ
        )
        return [*([f"# {said}"] if said else []), *(tasks.shell_line(task, os.environ) for task in own)]


def _check_only(spec: LaunchSpec, here: Sequence[Task]) -> None:
    names = [str(task) for task in here]
    for name in spec.only:
        if name not in names:
            raise LaunchError(
                asked=f"--only={name} shows that task's lines",
                found=f"the tasks started here are {', '.join(names[:12])}",
                remedy="Name one of them",
            )
