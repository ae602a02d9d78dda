"""The flags of `toolkit launch`, and which of them mean something where the tasks run."""

import argparse

from toolkit.errors import LaunchError

__all__ = ["add_arguments", "refuse_unused"]

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
    cluster.add_argument(
        "--task", action="append", default=[], metavar="worker:0", help="start just this one; may be repeated"
    )
    cluster.add_argument(
        "--open_network", action="store_true", help="public addresses are meant: a firewall guards their ports"
    )
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
        help="seconds after which a worker that isn't heard of, or a task that is stopped, counts as gone [15]",
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
        help="seconds between asking tasks to end and ending them [15], after a failure at most 5",
    )
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
    ssh = parser.add_argument_group("with --hosts, by ssh")
    ssh.add_argument("--hosts", metavar="a,b:2", help="start a task on a and two on b; the first is the chief")
    ssh.add_argument("--directory", metavar="DIR", help="where tasks run on each host [this directory's path]")
    ssh.add_argument("--copy_to", metavar="DIR", help="copy this directory there by rsync first, and run in the copy")
    ssh.add_argument("--python", metavar="PATH", help="the interpreter on each host [this one's path]")
    ssh.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="hand this variable on; may be repeated"
    )
    ssh.add_argument("--ssh_config", metavar="FILE", help="for ssh -F [the user's own]")
    ssh.add_argument(
        "--min_workers", type=int, default=0, metavar="N", help="go on with N or more when hosts are gone [all]"
    )
    what = parser.add_argument_group("what to start")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and its arguments"
    )
    what.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")


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
