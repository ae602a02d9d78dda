"""Start a script in several processes of this machine, watch them, and end them together.

    toolkit launch --workers=2 train.py --epochs=5
    toolkit launch --workers=2 -m recipes.cifar_multi_worker
    toolkit launch --cluster=tf_configs/two_hosts.json --task=worker:1 train.py

Every task gets its TF_CONFIG, its share of GPUs and threads, and a log file; all their lines are
shown here, and the first task that fails is named. The flags of launch come before the script.
"""

import argparse
from typing import TYPE_CHECKING

from toolkit.cli import log

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
        help="start a job that failed again, from its last checkpoint, up to N times [0]",
    )
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

    request = _request(arguments)
    if arguments.dry_run:
        for line in launch.dry_run(request):
            print(line)
        return
    log.show()
    launch.start(request)


def _request(given: argparse.Namespace) -> "Request":
    from toolkit import launch

    jobs = (
        ("chief", int(given.chief)),
        ("worker", given.workers),
        ("ps", given.ps),
        ("evaluator", int(given.evaluator)),
    )
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    return launch.Request(
        command=("-m", *given.module) if given.module is not None else tuple(script),
        jobs=launch.counted(jobs),
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
    )
