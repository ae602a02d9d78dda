"""How many tasks of each job: the flags --chief, --workers, --ps and --evaluator."""

import argparse

__all__ = ["counted"]


def counted(given: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    """Returns the jobs that have tasks, in their order.

    Raises:
        LaunchError: A number is negative, nobody would train, or parameter servers have no chief.
    """
    from toolkit import launch

    return launch.counted(
        (("chief", int(given.chief)), ("worker", given.workers), ("ps", given.ps), ("evaluator", int(given.evaluator)))
    )
