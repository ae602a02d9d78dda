"""Watch a running job on this terminal until it ends; the exit code is the job's. Ctrl-C leaves the job running.

    toolkit attach [ID]

ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that you
started in this directory.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)
    parser.add_argument(
        "--show", action="append", default=[], metavar="TASK", help="as of `toolkit launch`; may be repeated"
    )


def run(given: argparse.Namespace) -> None:
    """Watches the job.

    Raises:
        LaunchError: There is no such job.
        TaskFailed: It failed.
        JobStopped: It was stopped, or this program was told to.
    """
    from toolkit.launch import Job, jobs

    Job(jobs.find(given.job)).follow(show=given.show, lines=10)
