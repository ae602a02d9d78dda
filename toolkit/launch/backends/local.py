"""This machine as a place: its tasks are counted, or a file describes their cluster."""

import os
import socket
from collections.abc import Mapping, Sequence

from toolkit import cluster as _cluster
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import join
from toolkit.errors import LaunchError
from toolkit.launch.agent.connection import ConnectedAgent, local_agent
from toolkit.launch.agent.ports import HeldPorts
from toolkit.launch.agent.tasks import own_addresses, visible_gpus
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor.agents import Backend, assign


class LocalBackend(Backend):
    """This machine, as one host.

    Args:
        spec: What was asked.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Backend` has them.

    Raises:
        ClusterError: The cluster's file can't be used.
        LaunchError: No task of the cluster belongs to this machine, or the address isn't its own.
    """

    remedy = ""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._counts = spec.counts
        self._described: Cluster | None = None
        self._local: tuple[Task, ...] = ()
        if spec.cluster is None:
            if spec.host != "127.0.0.1" and not _is_local(join(spec.host, 1), own_addresses()):
                raise LaunchError(
                    asked=f"--host={spec.host} is where this machine's tasks reach one another",
                    found="this machine doesn't have that address",
                    remedy="Leave it out for loopback, or name one of the machine's own addresses",
                )
            self._counts = spec.counts or (("worker", len(visible_gpus({**os.environ, **spec.environment})) or 1),)
            number = sum(count for _, count in self._counts)
        else:
            self._described = _cluster.load(spec.cluster)
            self._local = _of_this_machine(self._described, spec)
            number = len(self._local)
        self.hosts: tuple[Host, ...] = (Host("this machine", number),)
        self.addresses = {self.hosts[0]: spec.host}

    def call(self, host: Host) -> ConnectedAgent:
        """Returns a new agent."""
        given = {str(task): _cluster.split(self._described.address(task))[1] for task in self._local if self._described}
        return local_agent(number=host.tasks, command=self._spec.command, given=given)

    def cluster(self, ports: Mapping[Host, Sequence[int]]) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster and those of its tasks to start here."""
        if self._described is not None:
            return self._described, dict.fromkeys(self._local, self.hosts[0])
        return assign(self._counts, self.hosts, self.addresses, ports)

    def planned(self) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster and the tasks to start here, with free ports."""
        with HeldPorts() as held:
            return self.cluster({host: [held.free() for _ in range(host.tasks)] for host in self.hosts})


def _of_this_machine(found: Cluster, spec: JobSpec) -> tuple[Task, ...]:
    if not spec.open_network:
        _cluster.refuse_public(found)
    if spec.task:
        return tuple(Task.parse(name) for name in spec.task)
    own = own_addresses()
    local = tuple(task for task in found.tasks if _is_local(found.address(task), own))
    if not local:
        raise LaunchError(
            asked=f"launch starts this machine's tasks of {spec.cluster}",
            found="none of the addresses in it is this machine's",
            remedy="Name the task to start here: --task=worker:0",
        )
    return local


def _is_local(address: str, own: set[str]) -> bool:
    host = _cluster.split(address)[0]
    try:
        answers = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # A label of more than 63 characters can't be a name.
        return False
    return any(answer[4][0] in own for answer in answers)
