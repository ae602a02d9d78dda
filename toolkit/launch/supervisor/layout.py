"""Decides which task runs on which host, and at which address."""

import itertools
from collections.abc import Mapping, Sequence

from toolkit import cluster
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import is_loopback, join
from toolkit.errors import LaunchError
from toolkit.launch.job.hosts import Host

__all__ = ["assign", "check_addresses", "spread"]


def check_addresses(addresses: Mapping[Host, str], *, open_network: bool) -> None:
    """Refuses addresses that mean different machines to different hosts, and public addresses unless they are allowed.

    Raises:
        LaunchError: Some are loopback, others not.
        ClusterError: One is public.
    """
    local = [host for host in addresses if is_loopback(addresses[host])]
    if local and len(local) < len(addresses):
        raise LaunchError(
            asked=f"the tasks on {local[0].name} and on the other hosts are to reach one another",
            found=f"{addresses[local[0]]} means another machine there",
            remedy="Name this machine by an address that the others can reach",
        )
    if not open_network:
        named = [join(host, 1 + number) for number, host in enumerate(addresses.values())]
        cluster.refuse_public(Cluster({"worker": named}))


def spread(tasks: int, hosts: int) -> list[int]:
    """Returns how many tasks run on each host: an equal number, and one more on the first hosts."""
    return [tasks // hosts + (number < tasks % hosts) for number in range(hosts)]


def assign(
    counts: Sequence[tuple[str, int]],
    hosts: Sequence[Host],
    addresses: Mapping[Host, str],
    ports: Mapping[Host, Sequence[int]] | None = None,
) -> tuple[Cluster, dict[Task, Host]]:
    """Returns the cluster of these hosts, and each task's host.

    Args:
        counts: How many tasks of each job; workers are renumbered where hosts are gone.
        hosts: All hosts, in their order.
        addresses: The address of each.
        ports: The hosts that are there, each with a port for each of its tasks; None for all hosts and any ports.
    """
    if ports is None:
        numbers = itertools.count(1)
        ports = {host: [next(numbers) for _ in range(host.tasks)] for host in hosts}
    every = [(host, join(addresses[host], port)) for host in hosts if host in ports for port in ports[host]]
    jobs = counts if sum(number for _, number in counts) == len(every) else (("worker", len(every)),)
    names = cluster.numbered(jobs)
    made = Cluster.at({task: address for task, (_, address) in zip(names, every, strict=True)})
    return made, {task: host for task, (host, _) in zip(names, every, strict=True)}
