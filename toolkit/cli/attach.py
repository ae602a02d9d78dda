"""Watch a job that runs, on this terminal; Ctrl-C leaves it running. Ends as the job ends, with its exit code.

    toolkit attach [ID]

ID is what `toolkit jobs` lists, or the beginning of it, or the directory of the logs. Without it, it is the newest job.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)


def run(given: argparse.Namespace) -> None:
    """Watches.

    Raises:
        LaunchError: There is no such job.
        TaskFailed: It failed.
        JobStopped: It was stopped, or this program was told to.
    """
    from toolkit.launch.records import jobs
    from toolkit.launch.watch import watch

    watch(jobs.find(given.job), lines=10)
