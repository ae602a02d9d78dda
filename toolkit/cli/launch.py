"""Start a script in several processes, watch them, and end them together.

    toolkit launch --workers=2 train.py --epochs=5
    toolkit launch --workers=2 -m recipes.cifar_multi_worker
    toolkit launch --cluster=tf_configs/two_hosts.json --task=worker:1 train.py
    toolkit launch --engine=slurm --nodes=2 --time=60 -m recipes.cifar_multi_worker

Every task gets its TF_CONFIG, its share of GPUs and threads, and a log file; all their lines are
shown here, and the first task that fails is named. The flags of launch come before the script.
"""

import argparse
import dataclasses
import os
import pathlib
import time
from typing import TYPE_CHECKING

from toolkit import secrecy
from toolkit.cli import log
from toolkit.cli.jobs import counted
from toolkit.errors import LaunchError

if TYPE_CHECKING:
    from toolkit.launch import Request

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    count, cluster = parser.add_argument_group("how many tasks"), parser.add_argument_group("or a cluster")
    count.add_argument("--workers", type=int, default=0, metavar="N", help="workers")
    count.add_argument("--ps", type=int, default=0, metavar="N", help="parameter servers")
    count.add_argument("--chief", action="store_true", help="a chief of its own, beside the workers")
    count.add_argument("--evaluator", action="store_true", help="an evaluator")
    count.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where they reach one another [127.0.0.1]"
    )
    cluster.add_argument("--cluster", metavar="FILE", help="start this machine's tasks of a tf_configs/ file")
    cluster.add_argument("--task", metavar="worker:0", help="start just this one")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--log_dir", metavar="DIR", help="a log file per task [runs/launch-TIME]")
    shown.add_argument(
        "--tee",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the tasks' lines here too",
    )
    shown.add_argument(
        "--only", action="append", default=[], metavar="worker:0", help="show this task's lines only; may be repeated"
    )
    shown.add_argument(
        "--dry_run", action="store_true", help="print each task's environment and command; start nothing"
    )
    how = parser.add_argument_group("how they run")
    how.add_argument(
        "--as_is", action="store_true", help="leave TensorFlow's own MultiWorkerMirroredStrategy to the script"
    )
    how.add_argument(
        "--start_timeout", type=float, default=300.0, metavar="S", help="seconds to wait for one another [300]"
    )
    how.add_argument(
        "--heartbeat_timeout",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds after which a worker that isn't heard of counts as gone [15]",
    )
    how.add_argument(
        "--stall_timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds without progress that end the job, 0 for any number [1800]",
    )
    how.add_argument(
        "--grace",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds between asking tasks to end and ending them [15]",
    )
    how.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a job that failed again, from its last checkpoint, up to N times within the window [0]",
    )
    how.add_argument(
        "--restart_window",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds after which a failure is forgiven [3600]",
    )
    slurm = parser.add_argument_group("with --engine=slurm")
    slurm.add_argument("--engine", default="local", metavar="NAME", help="local (this machine) or slurm [local]")
    slurm.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes [1]")
    slurm.add_argument("--tasks_per_node", type=int, metavar="N", help="tasks on each [as many as the jobs need]")
    slurm.add_argument("--gpus_per_task", type=int, default=0, metavar="N", help="GPUs of each task [0]")
    slurm.add_argument("--cpus_per_task", type=int, metavar="N", help="cores of each task [Slurm's default]")
    slurm.add_argument("--time", metavar="TIME", help="limit, as sbatch has it, such as 60 or 1-12 [the partition's]")
    slurm.add_argument(
        "--notice", type=int, default=120, metavar="S", help="seconds before it in which tasks write a checkpoint [120]"
    )
    slurm.add_argument("--partition", metavar="NAME", help="[the default one]")
    slurm.add_argument("--account", metavar="NAME", help="[the user's]")
    slurm.add_argument("--job_name", default="toolkit", metavar="NAME", help="[toolkit]")
    what = parser.add_argument_group("what to start")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and its arguments"
    )
    what.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")


def run(arguments: argparse.Namespace) -> None:
    """Launches.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed.
        JobStopped: The launcher was told to stop.
    """
    from toolkit import launch

    if arguments.engine == "slurm":
        _slurm(arguments)
        return
    if arguments.engine != "local":
        raise LaunchError(
            asked=f"--engine={arguments.engine}", found="there is no such engine", remedy="Choose local or slurm"
        )
    request = _request(arguments)
    if arguments.dry_run:
        for line in launch.dry_run(request):
            print(line)
        return
    log.show()
    launch.start(request)


def _command(given: argparse.Namespace) -> tuple[str, ...]:
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    # What follows a -- among a module's arguments is the script's, as argparse sees it.
    return ("-m", *given.module, *given.script) if given.module is not None else tuple(script)


def _slurm(given: argparse.Namespace) -> None:
    from toolkit import slurm

    command = _command(given)
    if not command or command == ("-m",):
        raise LaunchError(
            asked="--engine=slurm submits a script or a module",
            found="none is named",
            remedy="Name it after launch's own flags: -m recipes.cifar_multi_worker",
        )
    if given.cluster or given.task:
        raise LaunchError(
            asked="--engine=slurm starts tasks where Slurm has room",
            found="--cluster or --task says where they are",
            remedy="Leave one of the two out",
        )
    request = slurm.Request(
        name=given.job_name,
        nodes=given.nodes,
        tasks_per_node=given.tasks_per_node,
        jobs=counted(given),
        gpus_per_task=given.gpus_per_task,
        cpus_per_task=given.cpus_per_task,
        time=given.time,
        notice=given.notice,
        partition=given.partition,
        account=given.account,
        logs=pathlib.Path(given.log_dir or f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}"),
        command=command,
        max_restarts=given.max_restarts,
    )
    if given.dry_run:
        shown = tuple(secrecy.masked(part, os.environ) for part in command)
        print(slurm.script(dataclasses.replace(request, command=shown)), end="")
        return
    slurm.submit(request, show=lambda line: print(line, flush=True))


def _request(given: argparse.Namespace) -> "Request":
    from toolkit import launch

    return launch.Request(
        command=_command(given),
        jobs=counted(given),
        cluster_file=given.cluster,
        task=given.task,
        host=given.host,
        log_dir=given.log_dir,
        tee=given.tee,
        only=tuple(name for names in given.only for name in names.split(",")),
        as_is=given.as_is,
        start_timeout=given.start_timeout,
        heartbeat_timeout=given.heartbeat_timeout,
        stall_timeout=given.stall_timeout,
        grace=given.grace,
        max_restarts=given.max_restarts,
        restart_window=given.restart_window,
    )
