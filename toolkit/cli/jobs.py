"""List the jobs that you launched from this machine: on it, by ssh or under Slurm. The newest is the last.

Watch a running job with `toolkit attach ID`, and end it with `toolkit stop ID`. A job is dead when its machine or its
launcher is gone.
"""

import argparse
import json
import time

__all__ = ["add_arguments", "add_job", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("--json", action="store_true", help="print a list of objects for other programs")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Defines which job a command is about."""
    parser.add_argument("job", nargs="?", metavar="ID", help="the job [the newest]")


def run(given: argparse.Namespace) -> None:
    """Prints a table, or JSON."""
    import rich
    from rich import box
    from rich.table import Table

    from toolkit.launch.records import jobs

    known = jobs.every()
    if given.json:
        found = [
            {
                **{name: getattr(job, name) for name in ("id", "directory", "host", "slurm", "at")},
                "state": job.state(),
                "command": jobs.command(job),
            }
            for job in known
        ]
        print(json.dumps(found, indent=2))
        return
    if not known:
        print("No job has been launched here.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "state", "started"):
        table.add_column(heading, no_wrap=True)
    # On a terminal a line for each; what reads a pipe has all of it.
    table.add_column("command", overflow="ellipsis", no_wrap=rich.get_console().is_terminal)
    for job in known:
        state = job.state() + (f", Slurm {job.slurm}" if job.slurm else "")
        table.add_row(job.id, state, time.strftime("%a %H:%M", time.localtime(job.at)), jobs.command(job))
    rich.get_console().print(table, markup=False)
