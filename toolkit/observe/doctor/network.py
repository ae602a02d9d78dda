"""The hosts of a cluster: whether their names resolve, they answer, and their ports are free or answer."""

import ctypes
import errno
import socket
from collections.abc import Iterator

from toolkit.cluster import check, split
from toolkit.errors import ClusterError
from toolkit.launch.agent.ports import HeldPorts
from toolkit.launch.agent.tasks import own_addresses
from toolkit.observe.doctor.situation import Finding, Situation, failure, ok, warning

__all__ = ["look"]

_TIME_ERROR = 5  # adjtimex(2)'s result for a clock that isn't synchronised.
_SECONDS = 3.0  # Seconds in which a host must answer: within a site it takes milliseconds.


def look(situation: Situation) -> Iterator[Finding]:
    """Yields a finding for each task of the given cluster, or of TF_CONFIG's."""
    cluster = situation.cluster
    if cluster is None and "TF_CONFIG" in situation.environ:
        cluster = check(situation.environ["TF_CONFIG"]).cluster
    if cluster is None:
        return
    own = own_addresses()
    if len({split(cluster.address(task))[0] for task in cluster.tasks}) > 1 and not _clock_is_kept():
        yield warning(
            "clock",
            "no service synchronizes it, so times in the logs of several hosts may not agree",
            "timedatectl set-ntp true",
        )
    for task in cluster.tasks:
        yield _task(str(task), cluster.address(task), own)


def _clock_is_kept() -> bool:
    """Whether the kernel says that NTP synchronises the clock; True if it doesn't say."""
    try:
        # struct timex with modes 0, which only reads.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return True
    return state != _TIME_ERROR


def _task(task: str, address: str, own: set[str]) -> Finding:
    host, port = split(address)
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return failure(
            task,
            f"its host {host} can't be resolved ({(getattr(error, 'strerror', None) or str(error)).lower()})",
            f"getent hosts {host}; add it to DNS or /etc/hosts, or write its address in the cluster",
        )
    if any(str(answer[4][0]) in own or str(answer[4][0]).startswith("127.") for answer in answers):
        try:
            with HeldPorts() as held:
                held.given(port, task=task)
        except ClusterError as error:
            return failure(task, error.found, f"ss -ltnp 'sport = :{port}'; end that program, or choose another port")
        return ok(task, f"{address} is this machine, and its port is free")
    return _elsewhere(task, host, port)


def _elsewhere(task: str, host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except ConnectionRefusedError:
        return ok(task, f"{host} is reached; nobody listens on port {port} yet")
    except TimeoutError:
        found = f"{host} doesn't answer on port {port} within {_SECONDS:g} s"
        return failure(task, found, f"ping -c1 {host}; open port {port} in its firewall to the hosts of the cluster")
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        reason = "there is no route to it" if unreachable else (error.strerror or str(error)).lower()
        return failure(task, f"{host} can't be reached ({reason})", f"ip route get {host}")
    return ok(task, f"{host} is reached, and somebody listens on port {port}")
