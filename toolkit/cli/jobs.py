"""List the jobs that you launched from this machine: on it, by ssh or under Slurm. Those of this directory come first.
In each list the newest is the last; a running job shows the process of each task.

Watch a running job with `toolkit attach ID`, and end it with `toolkit stop ID`. A job is dead when its machine or its
launcher is gone. Goodput is the share of its time in which training made progress; --json has the rest.
"""

import argparse
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.launch.jobs import Entry

__all__ = ["add_arguments", "add_job", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("--json", action="store_true", help="print a list of objects for other programs")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Defines the argument that selects a job."""
    parser.add_argument("job", nargs="?", metavar="ID", help="the job [the newest that you started in this directory]")


def run(given: argparse.Namespace) -> None:
    """Prints a table, or JSON."""
    from toolkit.launch import jobs
    from toolkit.support import goodput

    known = jobs.every()
    if given.json:
        found = [
            {
                **{name: getattr(job, name) for name in ("id", "directory", "host", "slurm", "at", "started_in")},
                "state": job.state(),
                "goodput": goodput.summary(goodput.of_events(job.record.new())),
                "command": jobs.command(job),
                "processes": job.processes if job.alive else {},
            }
            for job in known
        ]
        print(json.dumps(found, indent=2))
        return
    if not known:
        print("No job has been launched here.")
        return
    for near, heading in ((True, "Started in this directory:"), (False, "Started elsewhere:")):
        if rows := [job for job in known if job.near is near]:
            print(heading)
            _show(rows, near=near)


def _show(found: "list[Entry]", *, near: bool) -> None:
    from toolkit.launch import jobs
    from toolkit.support import goodput

    rows = [("job", "state", "age", "goodput", "command")]
    for job in found:
        state = job.state() + (f", Slurm {job.slurm}" if job.slurm else "")
        where = "" if near else f"{job.started_in or job.directory}: "
        useful = goodput.summary(goodput.of_events(job.record.new()))
        share = f"{useful['share']:.0%}" if useful else ""
        rows.append((job.id, state, _age(time.time() - job.at), share, where + jobs.command(job)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # On a terminal each line stays one line; a pipe gets everything.
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row, entry in zip(rows, [None, *found], strict=True):
        line = "  ".join(f"{text:{width}}" for text, width in zip(row[:4], widths[:4], strict=True))
        _print(f"  {line}  {' '.join(row[4].split())}", most)
        if entry is not None and near and entry.alive and entry.processes:
            _print("    " + ", ".join(f"{task} is process {pid}" for task, pid in entry.processes.items()), most)


def _print(line: str, most: int | None) -> None:
    print(line if most is None or len(line) <= most else f"{line[: most - 3]}...")


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
