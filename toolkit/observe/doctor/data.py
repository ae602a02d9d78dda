"""The data sets on this machine."""

import os
import shlex
from collections.abc import Iterator

from toolkit.data.data_sets import cifar10_directory, cifar10_is_prepared
from toolkit.observe.doctor.situation import Finding, Situation, ok, warning

__all__ = ["look"]


def look(situation: Situation) -> Iterator[Finding]:
    """Yields which data set `--data=auto` uses."""
    named = situation.environ.get("TFDS_DATA_DIR")
    if named and not os.path.isdir(os.path.expanduser(named)):
        yield warning(
            "data", f"TFDS_DATA_DIR={named}, and there is no such directory", f"mkdir -p {shlex.quote(named)}"
        )
        return
    directory = cifar10_directory()
    if cifar10_is_prepared(directory):
        yield ok("data", f"CIFAR-10 is prepared in {directory}")
    else:
        yield ok("data", f"no CIFAR-10 in {directory}: --data=auto takes the embedded data set")
