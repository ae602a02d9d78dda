"""Start a script in several processes, watch them, and end them together.

    toolkit launch --workers=2 train.py --epochs=5
    toolkit launch --workers=2 -m recipes.cifar_multi_worker
    toolkit launch --cluster=tf_configs/two_hosts.json --task=worker:1 train.py
    toolkit launch --hosts=a,b:2 -m recipes.cifar_multi_worker
    toolkit launch --engine=slurm --nodes=2 --time=60 -m recipes.cifar_multi_worker

Every task gets its TF_CONFIG, its share of GPUs and threads, and a log file; all their lines are
shown here, and the first task that fails is named. The flags of launch come before the script.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from toolkit.cli import log
from toolkit.cli.launch_flags import add_arguments, counted, refuse_unused
from toolkit.errors import LaunchError, TaskFailed
from toolkit.support import redaction

if TYPE_CHECKING:
    from toolkit.launch import LaunchSpec

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> None:
    """Launches.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed.
        JobStopped: The launcher received a signal to stop.
    """
    refuse_unused(arguments)
    if arguments.engine == "slurm":
        _slurm(arguments)
    elif arguments.engine != "local":
        raise LaunchError(
            asked=f"--engine={arguments.engine}",
            found="there is no such engine",
            remedy="Choose local or slurm, or name machines with --hosts",
        )
    elif arguments.hosts is not None:
        _ssh(arguments)
    else:
        _local(arguments)


def _local(given: argparse.Namespace) -> None:
    from toolkit import launch

    spec = launch.LaunchSpec(cluster_file=given.cluster, tasks=tuple(given.task), host=given.host, **_options(given))
    if given.dry_run:
        print("\n".join(launch.dry_run(spec)))
        return
    log.show()
    isolated, where = _isolate(given, spec)
    try:
        launch.start(spec, where=where)
    except TaskFailed as error:
        if not isolated or not launch.wanted_out(str(error)):
            raise
        hint = "The tasks had no way out of this machine: launch with --isolate=never if that is what they miss."
        raise TaskFailed(f"{error}\n{hint}", code=error.exit_code) from error


def _isolate(given: argparse.Namespace, spec: "LaunchSpec") -> tuple[bool, str]:
    """Where the tasks reach one another by loopback, nobody else needs to; returns whether nobody can, and a clause."""
    from toolkit import launch
    from toolkit.cluster.addresses import is_loopback

    inside = bool(spec.jobs) and is_loopback(spec.host)
    if given.isolate == "always" and not inside:
        raise LaunchError(
            asked="--isolate=always gives the tasks a network of their own",
            found="they are to be reached from other machines",
            remedy="Leave it out, and close their ports to all but the hosts of the job",
        )
    if not inside and given.isolate in launch.MODES:
        return False, ""
    return launch.enter(given.isolate, command=spec.command)


def _ssh(given: argparse.Namespace) -> None:
    from toolkit.launch.backends import ssh

    spec = ssh.SshSpec(
        hosts=ssh.parse(given.hosts),
        directory=given.copy_to or given.directory or os.getcwd(),
        copy_from=os.getcwd() if given.copy_to else None,
        python=given.python or sys.executable,
        path=os.environ.get("PYTHONPATH"),
        ssh_config=given.ssh_config,
        min_workers=given.min_workers,
        **_options(given),
    )
    if given.dry_run:
        print("\n".join(ssh.dry_run(spec)))
        return
    log.show()
    ssh.start(spec)


def _slurm(given: argparse.Namespace) -> None:
    from toolkit.launch.backends import slurm

    slurms = ("nodes", "tasks_per_node", "gpus_per_task", "cpus_per_task", "time", "notice", "partition", "account")
    every = ("max_restarts", "start_timeout", "heartbeat_timeout", "as_is")
    spec = slurm.SlurmSpec(
        name=given.job_name,
        jobs=counted(given),
        logs=pathlib.Path(given.log_dir or f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}"),
        command=_command(given),
        **{name: getattr(given, name) for name in (*slurms, *every)},
    )
    if given.dry_run:
        shown = tuple(redaction.masked(part, os.environ) for part in spec.command)
        print(slurm.script(dataclasses.replace(spec, command=shown)), end="")
        return
    slurm.submit(spec, show=lambda line: print(line, flush=True))


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `toolkit.launch.JobOptions`."""
    same = ("log_dir", "tee", "as_is", "open_network", "start_timeout", "heartbeat_timeout", "stall_timeout", "grace")
    return {
        "command": _command(given),
        "jobs": counted(given),
        "environment": tuple(_variable(text) for text in given.env),
        "only": tuple(name for names in given.only for name in names.split(",")),
        **{name: getattr(given, name) for name in (*same, "max_restarts", "restart_window")},
    }


def _command(given: argparse.Namespace) -> tuple[str, ...]:
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    # A -- ends the REMAINDER that -m takes: argparse gives the rest of the module's arguments to the next argument,
    # which is the script.
    return ("-m", *given.module, *given.script) if given.module is not None else tuple(script)


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign and name not in os.environ:
        raise LaunchError(
            asked=f"--env={name[:60]}", found="it has no value here", remedy="Write --env=NAME=VALUE, or leave it out"
        )
    return name, value if sign else os.environ[name]
