"""Decides which launcher listens at a rendezvous: the first one on the host of its address."""

import errno
import socket

from toolkit.cluster import split
from toolkit.cluster.addresses import is_loopback
from toolkit.errors import LaunchError
from toolkit.launch.agent.tasks import own_addresses
from toolkit.launch.job.spec import JobSpec

__all__ = ["listen"]


def listen(spec: JobSpec) -> socket.socket | None:
    """Returns a socket that listens at the rendezvous; None if the address is another host's or already taken.

    Raises:
        LaunchError: The host has no address, or nobody may listen there.
    """
    host, port = split(spec.rendezvous or "")
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            asked=f"--rendezvous={spec.rendezvous} is where the hosts find one another",
            found=f"{host} has no address here ({(error.strerror or str(error)).lower()})",
            remedy="Name a host that every one of them can look up, or its address",
        ) from None
    own = own_addresses()
    here = next((answer for answer in answers if answer[4][0] in own or is_loopback(str(answer[4][0]))), None)
    if here is None:
        return None
    made = socket.socket(here[0], socket.SOCK_STREAM)
    # Debian maps a machine's own name to 127.0.1.1, which other machines can't reach.
    named = is_loopback(str(here[4][0])) and host not in ("localhost", here[4][0])
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port) if named else here[4])
        made.listen(128)
        made.setblocking(False)
        return made
    except OSError as error:
        made.close()
        if (
            error.errno == errno.EADDRINUSE
        ):  # Taken by this job's first launcher, or by another program, which answers otherwise.
            return None
        raise LaunchError(
            asked=f"--rendezvous={spec.rendezvous} is this machine, whose launcher listens there",
            found=f"it can't ({(error.strerror or str(error)).lower()})",
            remedy="Give a port from 1024 to 65535 at an address of this machine",
        ) from None
