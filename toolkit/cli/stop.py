"""End a job: its tasks are asked to, and have time for a checkpoint.

    toolkit stop [ID]

ID is what `toolkit jobs` lists, or the beginning of it, or the directory of the logs. Without it, it is the newest job.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)


def run(given: argparse.Namespace) -> None:
    """Ends it, and says how it has ended.

    Raises:
        LaunchError: There is no such job, or it can't be ended from here.
    """
    from toolkit.launch.records import jobs
    from toolkit.launch.watch import stop

    job = jobs.find(given.job)
    print(f"Job {job.id}: {stop(job)}")
