"""Starts a job from a spec at its place, or describes what would be started."""

import os
import shlex
import sys
from collections.abc import Mapping

from toolkit.launch.job import checks
from toolkit.launch.job.spec import JobSpec
from toolkit.support import redaction

__all__ = ["dry_run", "start"]


def start(spec: JobSpec, *, detach: bool = False) -> str:
    """Runs a job where its spec says, and returns when all its tasks are done.

    Args:
        spec: What is asked.
        detach: Return when it is started; it goes on by itself, also without the terminal.

    Returns:
        What to say of a detached job; "" of one that is done.

    Raises:
        RequestError: What was asked can't be done; nothing was started.
        TaskFailed: A task failed, a host is gone, or no task made progress.
        JobStopped: This program received a signal to stop.
    """
    # Imported here: every task imports this package at its start and needs none of these.
    from toolkit.launch.here import run_here

    if spec.place == "slurm":
        from toolkit.launch.backends import slurm

        checks.script(spec.command)
        job = slurm.submit(spec, follow=not detach)
        return slurm.head(spec, job) if detach else ""
    if detach:
        from toolkit.launch import detached

        job = detached.start(spec)
        afterwards = f"See it with `toolkit attach {job.id}`, end it with `toolkit stop {job.id}`."
        return f"launch: job {job.id} runs; logs in {job.directory}\n{afterwards}"
    run_here(spec)
    return ""


def dry_run(spec: JobSpec) -> str:
    """Returns the commands that would be run, with secrets masked. Starts nothing and connects to no host.

    The text is a shell command for each task (on this machine), a line for each host (ssh), the batch script (Slurm)
    or the manifest (Kubernetes).

    Raises:
        RequestError: What was asked can't be done.
    """
    if spec.place == "kubernetes":
        from toolkit.launch.backends import kubernetes

        return kubernetes.manifest_text(spec)
    if spec.place == "slurm":
        from toolkit.launch.backends import slurm

        checks.script(spec.command)
        return slurm.script(spec)
    known = {**os.environ, **spec.environment}
    if spec.place == "ssh":
        from toolkit.launch.backends.ssh import SshPlace
        from toolkit.launch.supervisor.layout import assign

        by_ssh = SshPlace(spec, mark="")
        _, tasks = assign(spec.counts, by_ssh.hosts, by_ssh.addresses)
        checks.shown(spec.show, list(map(str, tasks)))
        shown = _command(spec, by_ssh.python, known)
        return "\n".join(
            f"# {host.name}, {by_ssh.addresses[host]}, in {by_ssh.directory}: "
            f"{', '.join(str(task) for task, home in tasks.items() if home == host)}: {shown}"
            for host in by_ssh.hosts
        )
    if spec.rendezvous:
        return (
            f"# {spec.nodes} hosts come together at {spec.rendezvous}, where addresses and ports are chosen; "
            f"this one then starts its tasks of\n{_command(spec, sys.executable, known)}"
        )
    return "\n".join(_lines_here(spec))


def _command(spec: JobSpec, python: str, known: Mapping[str, str]) -> str:
    """Returns a task's command for a shell, with its variables, without secrets."""
    added = [f"{name}={value}" for name, value in spec.environment.items()]
    return shlex.join(redaction.masked_command((*(["env"] if added else []), *added, python, *spec.command), known))


def _lines_here(spec: JobSpec) -> list[str]:
    from toolkit.launch.agent import tasks
    from toolkit.launch.backends.local import LocalPlace

    checks.script(spec.command)
    place = LocalPlace(spec)
    cluster, homes = place.planned()
    checks.shown(spec.show, list(map(str, homes)))
    specs, note = tasks.task_specs(
        cluster,
        list(homes),
        command=spec.command,
        prefix=shlex.split(spec.prefix),
        environ={**os.environ, **spec.environment},
        settings={},
        as_is=spec.as_is,
        partial=len(homes) < len(cluster.tasks),
        socket_path="/dev/null",
    )
    return [*([f"# {note}"] if note else []), *(tasks.shell_line(t, os.environ, spec.environment) for t in specs)]
