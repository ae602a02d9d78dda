"""Finds what is wrong with this machine and its environment, and the command that corrects it.

situation    what the checks look at, and what they find
software     packages that fit together, what the environment changes, the data sets that are there
machine      processor, limits, disks, the clock, GPUs, and the hosts of a cluster
training     ten steps of training, run in its own process
self_test    one device, two replicas and two processes, compared
"""

from collections.abc import Iterator

from toolkit.observe.doctor import machine, software
from toolkit.observe.doctor.self_test import self_test
from toolkit.observe.doctor.situation import Finding, Situation

__all__ = ["Finding", "Situation", "examine", "self_test"]

_CHECKS = {
    "versions": software.look_at_versions,
    "environment": software.look_at_environment,
    "gpus": machine.look_at_gpus,
    "machine": machine.look_at_machine,
    "network": machine.look_at_network,
    "data": software.look_at_data,
}


def examine(situation: Situation) -> Iterator[Finding]:
    """Yields the findings of each check, one after another. No check changes anything, and none raises."""
    for name, look in _CHECKS.items():
        try:
            yield from look(situation)
        except Exception as error:  # A broken machine can make a check fail in unforeseen ways.
            yield Finding(
                check=name,
                level="failure",
                found=f"the check itself failed: {type(error).__name__}: {error}",
                cure="python -X faulthandler -m toolkit doctor --json",
            )
