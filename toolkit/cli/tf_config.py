"""TF_CONFIG, which tells each process of a cluster who takes part and which task it is.

    toolkit tf-config generate --worker=192.0.2.1:2222 --worker=192.0.2.2:2222 --task=worker:0
    toolkit tf-config generate --cluster=tf_configs/two_hosts.json --all
    toolkit tf-config check tf_configs/two_hosts.json
    toolkit tf-config explain

`check` and `explain` without a file look at what this process was given.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator

from toolkit.cluster import Cluster, Task, check, discover, load, parse
from toolkit.cluster.discovery import read_file
from toolkit.errors import ClusterError

_JOBS = {"chief": "the chief", "worker": "a worker", "ps": "a parameter server", "evaluator": "the evaluator"}
_WHERE = "a file, or - for standard input"
_ROWS = 40  # A larger table is shortened in the middle.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines generate, check and explain."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    generate = actions.add_parser("generate", help="print TF_CONFIG for one task, or for all")
    generate.description = "Print TF_CONFIG for one task as JSON, or for all as lines of shell."
    for job, words in _JOBS.items():
        generate.add_argument(f"--{job}", action="append", metavar="HOST:PORT", help=f"address of {words}")
    generate.add_argument("--cluster", metavar="FILE", help="take the cluster from a file instead")
    generate.add_argument("--task", metavar="JOB:INDEX", help="print this task's, such as worker:0")
    generate.add_argument("--all", action="store_true", help="print `export TF_CONFIG=...` for every task")
    generate.set_defaults(action=_generate)

    checks = actions.add_parser("check", help="list everything wrong with a TF_CONFIG, with the cure")
    checks.description = (
        "List every problem in a TF_CONFIG, its place and its fix. Exit code 0: no problem; 2: at least one."
    )
    checks.add_argument("file", nargs="?", metavar="FILE", help=f"{_WHERE}; the environment's TF_CONFIG unless given")
    checks.set_defaults(action=_check)

    explains = actions.add_parser("explain", help="say who does what in a cluster")
    explains.description = "Say who does what in a cluster, who is chief, and how many replicas are in sync."
    explains.add_argument("file", nargs="?", metavar="FILE", help=f"{_WHERE} [the cluster of this process]")
    explains.set_defaults(action=_explain)


def run(arguments: argparse.Namespace) -> object:
    """Runs the action; returns its exit code."""
    return arguments.action(arguments)


def _generate(arguments: argparse.Namespace) -> None:
    cluster = _asked_for(arguments)
    if bool(arguments.task) == arguments.all:
        raise ClusterError(
            asked="each task has its own TF_CONFIG",
            found="both --task and --all are given" if arguments.all else "neither --task nor --all is given",
            remedy=f"Give --all, or name one task. The tasks are {cluster.listed()}",
        )
    if arguments.task:
        print(cluster.tf_config(Task.parse(arguments.task)))
        return
    for task, text in cluster.tf_configs():
        print(f"export TF_CONFIG={shlex.quote(text)}  # {task}")


def _asked_for(arguments: argparse.Namespace) -> Cluster:
    jobs = {job: addresses for job in _JOBS if (addresses := getattr(arguments, job))}
    if bool(jobs) == bool(arguments.cluster):
        raise ClusterError(
            asked="a TF_CONFIG holds one cluster",
            found="addresses and --cluster are both given" if jobs else "no address is given",
            remedy="Give --worker=HOST:PORT once for each worker, or --cluster=FILE",
        )
    if jobs:
        return Cluster(jobs)
    return load(arguments.cluster)


def _check(arguments: argparse.Namespace) -> int:
    text, source = _text(arguments.file)
    # A file may describe all tasks, unlike a process's environment.
    checked = check(text, task_required=arguments.file is None)
    for note in checked.notes:
        print(f"note: {note}")
    if not checked.problems:
        own = f" It is for {checked.task}." if checked.task else " It names no task: it is for all."
        print(f"{source}: nothing is wrong. The tasks are {checked.sound.listed()}.{own}")
        return 0
    count = len(checked.problems)
    print(f"{source}: " + ("one thing is" if count == 1 else f"{count:,} things are") + " wrong.")
    for problem in checked.problems:
        print(f"  {problem.place}: {problem.found}\n      {problem.cure}.")
    return 2


def _explain(arguments: argparse.Namespace) -> None:
    if arguments.file is None:
        found = discover(os.environ)
        if found is None:
            print("This process was given no cluster: it trains alone, on the devices of this machine.")
        else:
            _show(found.cluster, found.task, source=found.source)
        return
    text, source = _text(arguments.file)
    checked = parse(text, source=source, task_required=False)
    _show(checked.sound, checked.task, source=source)


def _text(file: str | None) -> tuple[str | None, str]:
    """Returns a TF_CONFIG and the place where it was found."""
    if file is None:
        return os.environ.get("TF_CONFIG"), "TF_CONFIG"
    if file != "-":
        return read_file(file), file
    try:
        return sys.stdin.read(), "standard input"
    except UnicodeDecodeError:
        raise ClusterError(
            asked="standard input should describe a cluster", found="it is not UTF-8 text", remedy="Give it JSON"
        ) from None


def _show(cluster: Cluster, task: Task | None, *, source: str) -> None:
    """Prints the cluster's tasks and what each of them does.

    Args:
        cluster: All tasks.
        task: The one that is this process; None where nothing says so.
        source: Where the cluster comes from, in words.
    """
    import rich
    from rich.table import Table

    console = rich.get_console()
    table = Table(title=None, box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("address", overflow="fold")
    table.add_column("what it does", overflow="fold")
    for row in _rows(cluster, task):
        table.add_row(*row)
    count = len(cluster.tasks)
    console.print(f"{source} describes {count:,} task{'s' * (count > 1)}.\n", markup=False, highlight=False)
    console.print(table, markup=False, highlight=False)
    for line in ["", *_words(cluster, task)]:
        console.print(line, markup=False, highlight=False)


def _rows(cluster: Cluster, own: Task | None) -> Iterator[tuple[str, str, str]]:
    for job, _ in cluster.jobs:
        tasks = [task for task in cluster.tasks if task.job == job]
        few = len(cluster.tasks) <= _ROWS or len(tasks) <= 4
        kept = tasks if few else [*tasks[:2], *([own] if own in tasks[2:-1] else []), tasks[-1]]
        for i, task in enumerate(kept):
            if i and task.index > kept[i - 1].index + 1 and not few:
                yield "...", "", ""
            mark = "  <- this process" if task == own else ""
            yield str(task), cluster.address(task), _duty(cluster, task) + mark


def _duty(cluster: Cluster, task: Task) -> str:
    asynchronous = not cluster.synchronous
    if task.job == "ps":
        return "holds a share of the variables"
    if task.job == "evaluator":
        return "evaluates checkpoints"
    if asynchronous:
        return "coordinates, writes checkpoints" if task.job == "chief" else "trains at its own pace"
    return "trains, writes checkpoints" if task == cluster.chief else "trains"


def _words(cluster: Cluster, own: Task | None) -> Iterator[str]:
    together = len(cluster.synchronous)
    yield f"The chief is {cluster.chief}, at {cluster.address(cluster.chief)}."
    if not together:
        counts = {job: len(entries) for job, entries in cluster.jobs}
        yield "No replicas are in sync: no worker waits for another."
        yield f"Workers: {counts['worker']:,}. Parameter servers, which hold the variables: {counts['ps']:,}."
    elif together == 1:
        yield "One task trains: as many replicas are in sync as it has devices."
    else:
        yield f"Replicas in sync: {together:,} with one device each, {2 * together:,} with two."
    if own is None:
        yield "It names no task; `toolkit tf-config generate` prints a TF_CONFIG for each."
    elif own in cluster:
        yield f"This process is {own}."
    else:
        yield f"This process is {own}, which evaluates this cluster from outside."
