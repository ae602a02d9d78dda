"""Which task goes to which host, and at which address."""

import itertools
from collections.abc import Mapping, Sequence

from toolkit import cluster as _cluster
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import is_loopback, join
from toolkit.errors import LaunchError
from toolkit.launch.backends.ssh.hosts import Host
from toolkit.launch.backends.ssh.request import Request

__all__ = ["check_addresses", "place"]


def check_addresses(request: Request, addresses: Mapping[Host, str]) -> None:
    """Makes sure that the hosts can mean the same by their addresses, and that those are not public.

    Raises:
        LaunchError: Some are loopback, others not.
        ClusterError: One is public.
    """
    local = [host.name for host in request.hosts if is_loopback(addresses[host])]
    if local and len(local) < len(request.hosts):
        raise LaunchError(
            asked=f"the tasks on {local[0]} and on the other hosts are to reach one another",
            found=f"{addresses[next(h for h in request.hosts if h.name == local[0])]} means another machine there",
            remedy="Name this machine by an address that the others can reach",
        )
    if not request.open_network:
        _cluster.refuse_public(
            Cluster({"worker": [join(host, 1 + number) for number, host in enumerate(addresses.values())]})
        )


def place(
    request: Request, addresses: Mapping[Host, str], ports: Mapping[Host, Sequence[int]] | None = None
) -> tuple[Cluster, dict[Host, tuple[Task, ...]]]:
    """Returns the cluster of the hosts that are there, and each host's tasks.

    Args:
        request: What was asked.
        ports: Of each host that is there, one for each of its tasks; None for all hosts and any ports.
        addresses: Of each host.
    """
    if ports is None:
        numbers = itertools.count(1)
        ports = {host: [next(numbers) for _ in range(host.tasks)] for host in request.hosts}
    every = [(host, join(addresses[host], port)) for host in request.hosts if host in ports for port in ports[host]]
    jobs = request.jobs if sum(number for _, number in request.jobs) == len(every) else (("worker", len(every)),)
    names = [Task(job, index) for job, number in jobs for index in range(number)]
    described: dict[str, list[str]] = {}
    tasks: dict[Host, tuple[Task, ...]] = {}
    for task, (host, address) in zip(names, every, strict=True):
        described.setdefault(task.job, []).append(address)
        tasks[host] = (*tasks.get(host, ()), task)
    return Cluster(described), tasks
