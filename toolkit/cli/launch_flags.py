"""The flags of `toolkit launch`, and which of them mean something where the tasks run."""

import argparse

from toolkit.errors import LaunchError
from toolkit.support import status

__all__ = ["add_arguments", "add_command", "add_counts", "counted", "refuse_unused"]

_SLURM = (
    "nodes",
    "tasks_per_node",
    "gpus_per_task",
    "cpus_per_task",
    "time",
    "notice",
    "partition",
    "account",
    "job_name",
)
_SSH = ("directory", "copy_to", "python", "ssh_config", "min_workers")
_HERE = ("host", "cluster", "task")
# Those that would be ignored without a word:
_UNUSED = {
    "this machine": (*_SLURM, *_SSH),
    "--hosts": (*_SLURM, *_HERE, "isolate"),
    "--engine=slurm": (
        *_SSH,
        *_HERE,
        *("env", "isolate", "open_network", "tee", "only", "stall_timeout", "grace", "restart_window"),
    ),
}


def add_counts(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Defines the flags that say how many tasks of each job there are."""
    group.add_argument("--workers", type=int, default=0, metavar="N", help="workers")
    group.add_argument("--ps", type=int, default=0, metavar="N", help="parameter servers")
    group.add_argument("--chief", action="store_true", help="a chief of its own, beside the workers")
    group.add_argument("--evaluator", action="store_true", help="an evaluator")


def counted(given: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    """Returns the jobs that have tasks, in their order.

    Raises:
        LaunchError: A number is negative, nobody would train, or parameter servers have no chief.
    """
    from toolkit import launch

    return launch.counted(
        (("chief", int(given.chief)), ("worker", given.workers), ("ps", given.ps), ("evaluator", int(given.evaluator)))
    )


def add_command(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Defines -m, behind which everything is the module's."""
    group.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, its arguments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    count, cluster = parser.add_argument_group("how many tasks"), parser.add_argument_group("or a cluster")
    add_counts(count)
    count.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where they reach one another [127.0.0.1]"
    )
    cluster.add_argument("--cluster", metavar="FILE", help="start this machine's tasks of a tf_configs/ file")
    _several(cluster, "--task", "worker:0", "start just this one; may be repeated")
    cluster.add_argument(
        "--open_network", action="store_true", help="public addresses are meant: a firewall guards their ports"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--log_dir", metavar="DIR", help="a log file per task [runs/launch-TIME]")
    shown.add_argument(
        "--tee", action=argparse.BooleanOptionalAction, default=True, help="show the tasks' lines here too"
    )
    _several(shown, "--only", "worker:0", "show this task's lines only; may be repeated")
    shown.add_argument(
        "--dry_run", action="store_true", help="print each task's environment and command; start nothing"
    )
    how = parser.add_argument_group("how they run")
    how.add_argument(
        "--as_is", action="store_true", help="leave TensorFlow's own MultiWorkerMirroredStrategy to the script"
    )
    _seconds(how, "--start_timeout", 300, "seconds to wait for one another [300]")
    _seconds(
        how,
        "--heartbeat_timeout",
        status.SECONDS_OF_SILENCE,
        f"seconds of silence after which a worker, or a task that is stopped, counts as gone "
        f"[{status.SECONDS_OF_SILENCE:g}]",
    )
    _seconds(how, "--stall_timeout", 1800, "seconds without progress that end the job, 0 for any number [1800]")
    _seconds(how, "--grace", 15, "seconds between asking tasks to end and ending them [15], after a failure at most 5")
    how.add_argument(
        "--isolate",
        default="auto",
        metavar="auto|always|never",
        help="give this machine's tasks a network of their own, closed to everybody else [auto]",
    )
    how.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a job that failed again, from its last checkpoint, up to N times within the window [0]",
    )
    _seconds(how, "--restart_window", 3600, "seconds after which a failure is forgiven [3600]")
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
    ssh = parser.add_argument_group("with --hosts, by ssh")
    ssh.add_argument("--hosts", metavar="a,b:2", help="start a task on a and two on b; the first is the chief")
    ssh.add_argument("--directory", metavar="DIR", help="where tasks run on each host [this directory's path]")
    ssh.add_argument("--copy_to", metavar="DIR", help="copy this directory there by rsync first, and run in the copy")
    ssh.add_argument("--python", metavar="PATH", help="the interpreter on each host [this one's path]")
    _several(ssh, "--env", "NAME[=VALUE]", "set this variable for the tasks; may be repeated")
    ssh.add_argument("--ssh_config", metavar="FILE", help="for ssh -F [the user's own]")
    ssh.add_argument(
        "--min_workers", type=int, default=0, metavar="N", help="go on with N or more when hosts are gone [all]"
    )
    what = parser.add_argument_group("what to start")
    add_command(what)
    what.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")


def _several(group: argparse._ArgumentGroup, flag: str, metavar: str, text: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)


def _seconds(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=float(default), metavar="S", help=text)


def refuse_unused(given: argparse.Namespace) -> None:
    """Makes sure that every flag that was given means something.

    Raises:
        LaunchError: One is another engine's.
    """
    if given.engine == "slurm" and given.hosts is not None:
        raise LaunchError(
            asked="--engine=slurm starts tasks where Slurm has room",
            found="--hosts says where they are",
            remedy="Leave one of the two out",
        )
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    defaults = plain.parse_args([])
    engine = "--engine=slurm" if given.engine == "slurm" else "--hosts" if given.hosts is not None else "this machine"
    for flag in _UNUSED[engine]:
        if getattr(given, flag) != getattr(defaults, flag):
            where = "for tasks of this machine alone" if engine == "this machine" else f"with {engine}"
            raise LaunchError(asked=f"--{flag}", found=f"it means nothing {where}", remedy="Leave it out")
