"""Which task runs on which host, and at which address."""

import itertools
from collections.abc import Mapping, Sequence

from toolkit import cluster as _cluster
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import is_loopback, join
from toolkit.errors import LaunchError
from toolkit.launch.backends.ssh.spec import Host, SshSpec

__all__ = ["assign", "check_addresses"]


def check_addresses(spec: SshSpec, addresses: Mapping[Host, str]) -> None:
    """Makes sure that the hosts can mean the same by their addresses, and that those are not public.

    Raises:
        LaunchError: Some are loopback, others not.
        ClusterError: One is public.
    """
    local = [host.name for host in spec.hosts if is_loopback(addresses[host])]
    if local and len(local) < len(spec.hosts):
        raise LaunchError(
            asked=f"the tasks on {local[0]} and on the other hosts are to reach one another",
            found=f"{addresses[next(h for h in spec.hosts if h.name == local[0])]} means another machine there",
            remedy="Name this machine by an address that the others can reach",
        )
    if not spec.open_network:
        _cluster.refuse_public(
            Cluster({"worker": [join(host, 1 + number) for number, host in enumerate(addresses.values())]})
        )


def assign(
    spec: SshSpec, addresses: Mapping[Host, str], ports: Mapping[Host, Sequence[int]] | None = None
) -> tuple[Cluster, dict[Host, tuple[Task, ...]]]:
    """Returns the cluster of the hosts that are there, and each host's tasks.

    Args:
        spec: What was asked.
        addresses: The address of each host.
        ports: The hosts that are there, each with a port for each of its tasks; None for all hosts and any ports.
    """
    if ports is None:
        numbers = itertools.count(1)
        ports = {host: [next(numbers) for _ in range(host.tasks)] for host in spec.hosts}
    every = [(host, join(addresses[host], port)) for host in spec.hosts if host in ports for port in ports[host]]
    jobs = spec.jobs if sum(number for _, number in spec.jobs) == len(every) else (("worker", len(every)),)
    names = _cluster.numbered(jobs)
    tasks: dict[Host, tuple[Task, ...]] = {}
    for task, (host, _) in zip(names, every, strict=True):
        tasks[host] = (*tasks.get(host, ()), task)
    return Cluster.at({task: address for task, (_, address) in zip(names, every, strict=True)}), tasks
