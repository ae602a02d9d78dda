"""Addresses that the whole internet may reach: TensorFlow's servers obey whoever does."""

import ipaddress
import socket

from toolkit.cluster.addresses import split
from toolkit.cluster.spec import Cluster
from toolkit.errors import ClusterError

__all__ = ["is_public", "refuse_public"]


def is_public(host: str) -> bool:
    """Says whether a name or an address belongs to the public internet, by every answer of the resolver's.

    A name that can't be resolved here belongs to nobody that this machine knows.
    """
    try:
        answers = {str(answer[4][0]).partition("%")[0] for answer in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(ipaddress.ip_address(answer).is_global for answer in answers)


def refuse_public(cluster: Cluster) -> None:
    """Makes sure that no task of the cluster is at a public address.

    Raises:
        ClusterError: One is.
    """
    for task in cluster.tasks:
        host, port = split(cluster.address(task))
        if is_public(host):
            raise ClusterError(
                asked=f"{task} is to listen at {host}, port {port}",
                found="that is a public address, and TensorFlow's servers take orders from whoever reaches them",
                remedy="Use the hosts' private addresses; or add --open_network once a firewall lets in nobody "
                "but the hosts of the job",
            )
