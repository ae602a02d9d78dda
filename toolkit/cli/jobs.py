"""List the jobs that you launched from this machine: on it, by ssh or under Slurm. The newest is the last.

Watch a running job with `toolkit attach ID`, and end it with `toolkit stop ID`. A job is dead when its machine or its
launcher is gone.
"""

import argparse
import time

__all__ = ["add_arguments", "add_job", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes nothing."""


def add_job(parser: argparse.ArgumentParser) -> None:
    """Defines which job a command is about."""
    parser.add_argument("job", nargs="?", metavar="ID", help="the job [the newest]")


def run(_: argparse.Namespace) -> None:
    """Prints a table."""
    import rich
    from rich import box
    from rich.table import Table

    from toolkit.launch.records import jobs

    known = jobs.every()
    if not known:
        print("No job has been launched here.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "state", "started"):
        table.add_column(heading, no_wrap=True)
    table.add_column("command", overflow="fold")
    for job in known:
        state = job.state() + (f", Slurm {job.slurm}" if job.slurm else "")
        table.add_row(job.id, state, time.strftime("%a %H:%M", time.localtime(job.at)), jobs.command(job))
    rich.get_console().print(table, markup=False)
