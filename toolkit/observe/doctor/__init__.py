"""Finds what is wrong with this machine and its environment, and the command that corrects it.

situation    what the checks look at, and what they find
versions     packages that fit together
environment  variables and files that change what a script does
gpus         cards, driver, libraries, and whether TensorFlow sees them
machine      processor, limits, disks, shared memory (/dev/shm), the clock
network      the hosts of a cluster
data         the data sets that are there
training     ten steps of training, run in its own process
self_test    one device, two replicas and two processes, compared
"""

from collections.abc import Iterator

from toolkit.observe.doctor import data, environment, gpus, machine, network, versions
from toolkit.observe.doctor.self_test import self_test
from toolkit.observe.doctor.situation import Finding, Situation

__all__ = ["Finding", "Situation", "examine", "self_test"]


def examine(situation: Situation) -> Iterator[Finding]:
    """Yields the findings of each check, one after another. No check changes anything, and none raises."""
    for room in (versions, environment, gpus, machine, network, data):
        try:
            yield from room.look(situation)
        except Exception as error:  # A broken machine can make a check fail in unforeseen ways.
            name = room.__name__.rpartition(".")[2]
            yield Finding(
                check=name,
                level="failure",
                found=f"the check itself failed: {type(error).__name__}: {error}",
                cure="python -X faulthandler -m toolkit doctor --json",
            )
