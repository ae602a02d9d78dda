"""What the checks look at: handed to them, so that a test can show them another machine."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping

from toolkit.cluster import Cluster, load
from toolkit.devices import Inventory, take
from toolkit.errors import RequestError

__all__ = ["Situation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """A machine, an environment, and perhaps a cluster.

    Attributes:
        environ: Environment variables.
        inventory: GPUs and cores.
        cluster: That training is to run on, None for this machine alone.
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
        """Returns where this process is.

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
                asked="the current directory is where scripts would be started",
                found="it, or every directory for temporary files, is gone",
                remedy="cd to one that is there; or set TMPDIR",
            ) from error
        return cls(environ=os.environ, inventory=take(), cluster=cluster, here=here, temporary=temporary)
