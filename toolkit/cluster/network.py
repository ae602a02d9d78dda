"""Finds what can come between the tasks of a cluster: web proxies, and strangers at a public address.

gRPC sends to peers through a web proxy where one is set, and TensorFlow then waits for ever. TensorFlow's servers obey
every program that reaches them.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping

from toolkit.cluster.addresses import split
from toolkit.cluster.spec import Cluster
from toolkit.errors import ClusterError

__all__ = ["is_public", "reach_directly", "refuse_public", "without_proxies"]

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # In the order in which gRPC reads them.
_EXCEPT = ("no_grpc_proxy", "no_proxy")


def without_proxies(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns additions to an environment so that gRPC reaches every task directly."""
    proxied = _proxied(cluster, environ)
    return {"no_grpc_proxy": _excepted(environ, proxied)} if proxied else {}


def reach_directly(cluster: Cluster) -> None:
    """Makes this process reach every task without a proxy. gRPC reads the environment whenever it opens a channel."""
    os.environ.update(without_proxies(cluster, os.environ))


def is_public(host: str) -> bool:
    """Returns whether a name or an address belongs to the public internet, by all of the resolver's answers.

    A name that can't be resolved here doesn't count as public.
    """
    try:
        answers = {str(answer[4][0]).partition("%")[0] for answer in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(ipaddress.ip_address(answer).is_global for answer in answers)


def refuse_public(cluster: Cluster) -> None:
    """Checks that no task of the cluster is at a public address.

    Raises:
        ClusterError: One is.
    """
    for task in cluster.tasks:
        host, port = split(cluster.address(task))
        if is_public(host):
            raise ClusterError(
                asked=f"{task} is to listen at {host}, port {port}",
                found="that is a public address, and anyone who reaches TensorFlow's servers can run programs in them",
                remedy="Use the hosts' private addresses; or add --open_network once a firewall admits nobody "
                "but the hosts of the job",
            )


def _proxied(cluster: Cluster, environ: Mapping[str, str]) -> list[str]:
    if not any(environ.get(name) for name in _PROXIES):
        return []
    entries = _entries(environ)
    hosts = dict.fromkeys(split(cluster.address(task))[0] for task in cluster.tasks)
    return [host for host in hosts if not any(_covers(entry, host) for entry in entries)]


def _entries(environ: Mapping[str, str]) -> list[str]:
    listed = next((environ[name] for name in _EXCEPT if environ.get(name)), "")
    return [entry.strip() for entry in listed.split(",") if entry.strip()]


def _excepted(environ: Mapping[str, str], hosts: Iterable[str]) -> str:
    # gRPC reads no_proxy only if there is no no_grpc_proxy, so its exceptions must be repeated.
    return ",".join([*_entries(environ), *hosts])


def _covers(entry: str, host: str) -> bool:
    """Compares as gRPC does: an entry is the end of a name, or a range of addresses."""
    if "/" in entry:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    return host.lower().endswith(entry.lower())
