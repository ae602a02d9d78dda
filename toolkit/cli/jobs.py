"""List the jobs that you launched from this machine: on it, by ssh or under Slurm. The newest is the last.

Watch a running job with `toolkit attach ID`, and end it with `toolkit stop ID`. A job is dead when its machine or its
launcher is gone. Goodput is the share of its time in which training made progress; --json has the rest.
"""

import argparse
import json
import shutil
import sys
import time

__all__ = ["add_arguments", "add_job", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("--json", action="store_true", help="print a list of objects for other programs")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Defines the argument that selects a job."""
    parser.add_argument("job", nargs="?", metavar="ID", help="the job [the newest]")


def run(given: argparse.Namespace) -> None:
    """Prints a table, or JSON."""
    from toolkit.launch.records import jobs
    from toolkit.support import goodput

    known = jobs.every()
    if given.json:
        found = [
            {
                **{name: getattr(job, name) for name in ("id", "directory", "host", "slurm", "at")},
                "state": job.state(),
                "goodput": goodput.summary(goodput.of_events(job.record.new())),
                "command": jobs.command(job),
            }
            for job in known
        ]
        print(json.dumps(found, indent=2))
        return
    if not known:
        print("No job has been launched here.")
        return
    rows = [("job", "state", "started", "goodput", "command")]
    for job in known:
        state = job.state() + (f", Slurm {job.slurm}" if job.slurm else "")
        useful = goodput.summary(goodput.of_events(job.record.new()))
        share = f"{useful['share']:.0%}" if useful else ""
        rows.append((job.id, state, time.strftime("%a %H:%M", time.localtime(job.at)), share, jobs.command(job)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # On a terminal each job takes one line; a pipe gets everything.
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        line = "  ".join(f"{text:{width}}" for text, width in zip(row[:4], widths[:4], strict=True))
        line = f"{line}  {' '.join(row[4].split())}"
        print(line if most is None or len(line) <= most else f"{line[: most - 3]}...")
