"""Show what the tasks of a job wrote in its last attempt, or in the one that --attempt names.

    toolkit logs                        for the job that you started last in this directory
    toolkit logs ID -f --task=worker:1

ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument(
        "--task", action="append", default=[], metavar="TASK", help="show only this task; may be repeated"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="attempt to show [the last]")
    parser.add_argument("--native_logs", action="store_true", help="TensorFlow's own notes, too")


def run(given: argparse.Namespace) -> None:
    """Prints the logs.

    Raises:
        LaunchError: There is no such job, task or attempt.
    """
    from toolkit.launch import Job, jobs

    found = jobs.find(given.job)
    job = Job(found)
    if not job.attempts() and not found.alive and (written := found.record.beginnings()):
        print(written)
    elif given.follow:
        job.follow(show=given.task or ["all"], native_logs=given.native_logs)
    else:
        job.show(given.task, attempt=given.attempt, native_logs=given.native_logs)
