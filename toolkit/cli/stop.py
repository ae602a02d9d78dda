"""End a job. Its tasks are asked to end, and get time to write a checkpoint.

    toolkit stop [ID]

ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that you
started in this directory, of those that run.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)


def run(given: argparse.Namespace) -> None:
    """Ends the job, and prints how it ended.

    Raises:
        LaunchError: There is no such job, or it can't be ended from here.
    """
    from toolkit.launch import Job, jobs

    job = jobs.find(given.job, runs=True)
    if not job.state().startswith("on ") and not job.alive:
        print(f"Job {job.id} had ended already: {job.state()}")
        return
    print(f"Job {job.id}: {Job(job).stop()}")
