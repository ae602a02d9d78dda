"""What the checks examine, which tests can replace by another machine, and what they find."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Literal

from toolkit.cluster import Cluster, load
from toolkit.devices import Inventory, take
from toolkit.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """A machine, an environment, and possibly a cluster.

    Attributes:
        environ: The environment variables.
        inventory: The GPUs and cores.
        cluster: The cluster that training is to run on; None for this machine alone.
        here: The directory in which a script would be started.
        temporary: The directory for temporary files.
        cpuinfo: The kernel's description of the processor.
        shared_memory: The directory of shared memory.
        pci: The kernel's list of cards on the PCI bus.
    """

    environ: Mapping[str, str]
    inventory: Inventory
    cluster: Cluster | None = None
    here: pathlib.Path
    temporary: pathlib.Path
    cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")
    shared_memory: pathlib.Path = pathlib.Path("/dev/shm")
    pci: pathlib.Path = pathlib.Path("/sys/bus/pci/devices")

    @classmethod
    def of_this_process(cls, cluster_file: str | None = None) -> "Situation":
        """Returns this process's surroundings.

        Args:
            cluster_file: Describes a cluster, such as tf_configs/two_hosts.json.

        Raises:
            ClusterError: The file can't be used.
            RequestError: The current directory is gone.
        """
        cluster = None
        if cluster_file is not None:
            cluster = load(cluster_file)
        try:
            here, temporary = pathlib.Path.cwd(), pathlib.Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise RequestError(
                asked="the checks look at the current directory and at one for temporary files",
                found="one of the two can't be used",
                remedy="Change to a directory that exists, or set TMPDIR",
            ) from error
        return cls(environ=os.environ, inventory=take(), cluster=cluster, here=here, temporary=temporary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What was looked at, in a word or two: "protobuf", "KERAS_BACKEND".
        level: "ok"; "warning" where training works, but not as one may think; "failure" where it can't.
        found: What was found, as a sentence without its full stop.
        cure: The command or step that mends it; "" where nothing is to be mended.
    """

    check: str
    level: Literal["ok", "warning", "failure"]
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(check=check, level="ok", found=found)


def warning(check: str, found: str, cure: str) -> Finding:
    """Returns a finding about a problem with which training still works."""
    return Finding(check=check, level="warning", found=found, cure=cure)


def failure(check: str, found: str, cure: str) -> Finding:
    """Returns a finding about a problem with which training fails."""
    return Finding(check=check, level="failure", found=found, cure=cure)
