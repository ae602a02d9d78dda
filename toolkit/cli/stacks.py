"""Show where the tasks of a running job are: each one's Python stacks, and which tasks the others wait for.

    toolkit stacks [ID]

ID is a job's id from `toolkit jobs`, the beginning of one, or the directory of its logs. Default: the newest that runs.
Frames of libraries are folded here; the tasks' logs have the whole stacks. The job goes on.
"""

import argparse

from toolkit.cli.jobs import add_job

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    add_job(parser)


def run(given: argparse.Namespace) -> None:
    """Prints the stacks.

    Raises:
        LaunchError: There is no such job, it doesn't run, or it doesn't answer.
    """
    from toolkit.launch import Job, jobs
    from toolkit.launch.supervisor.stacks import folded

    words, found = Job(jobs.find(given.job, runs=True)).where()
    for task, text in found.items():
        print(f"--- {task} ---\n{folded(text.strip()) or '(it did not answer)'}\n")
    print(words)
