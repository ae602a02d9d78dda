"""Addresses "host:port": splits, compares and checks them.

The forms are gRPC's: a name or an IPv4 address as it is, an IPv6 address in brackets.
"""

import ipaddress
import re
from collections.abc import Iterator

from toolkit.errors import ClusterError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_HOST = re.compile(r"[\w.-]+")
_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback", "localhost.localdomain")


def split(address: str) -> tuple[str, int]:
    """Splits "host:port"; the host of "[::1]:2222" is "::1".

    Raises:
        ClusterError: It is no such address.
    """
    for found, cure in faults(address):
        raise ClusterError(asked=f"the address {address!r}", found=found, remedy=cure)
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join(host: str, port: int) -> str:
    """Joins host and port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address always means the machine itself."""
    host = host.lower().removesuffix(".")
    if host in _LOCAL_NAMES or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host):
        return True
    if ":" not in host:
        return False
    ipv6 = _ipv6(host)
    return ipv6 is not None and (ipv6.is_loopback or bool(ipv6.ipv4_mapped and ipv6.ipv4_mapped.is_loopback))


def canonical(address: str) -> str:
    """Returns the same spelling for all addresses that reach the same port, as far as that is known without DNS.

    All of loopback is one: TensorFlow's server binds every interface, whichever address it is given,
    so 127.0.0.1:2222 and 127.0.0.2:2222 can't both be had.

    Raises:
        ClusterError: As `split`.
    """
    host, port = split(address)
    if is_loopback(host):
        return f"localhost:{port}"
    ipv6 = _ipv6(host) if ":" in host else None
    return join(str(ipv6) if ipv6 else host.lower().removesuffix("."), port)


def faults(address: str) -> Iterator[tuple[str, str]]:
    """Yields everything that is wrong with an address: the finding and the remedy."""
    text = address.strip()
    if text != address:
        yield f"there is white space around {text[:60]!r}", "Remove it"
    if any(character.isspace() for character in text):
        yield f"there is white space inside {text[:60]!r}", "Remove it"
        text = "".join(text.split())
    scheme = _SCHEME.match(text)
    if scheme:
        yield f"it begins with {scheme[0]!r}", "Write host:port alone, without a scheme"
        text = text[scheme.end() :]
    if not text:
        yield "it is empty", "Write host:port, such as 192.0.2.1:2222"
        return
    if text.startswith("["):
        yield from _bracketed(text)
        return
    if text.count(":") > 1:
        yield from _many_colons(text)
        return
    host, colon, port = text.partition(":")
    yield from _host_faults(host)
    yield from _port_faults(colon, port, host)


def _bracketed(text: str) -> Iterator[tuple[str, str]]:
    host, bracket, rest = text[1:].partition("]")
    if not bracket:
        yield "the bracket is never closed", "Write an IPv6 address as [::1]:2222"
        return
    if _ipv6(host) is None:
        yield f"{host[:60]!r} in brackets is no IPv6 address", "Put only IPv6 addresses in brackets, as [::1]:2222"
    yield from _port_faults(rest[:1], rest[1:], f"[{host}]")


def _many_colons(text: str) -> Iterator[tuple[str, str]]:
    host, _, port = text.rpartition(":")
    if not _ipv6(host) and not _ipv6(text):
        yield f"{text[:60]!r} has more than one colon", "Write one host and one port, such as 192.0.2.1:2222"
        return
    # "::1:2222" is also an address without a port; only its author knows what was meant.
    written = f"[{host}]:{port}" if _ipv6(host) and port.isdigit() else f"[{text}]:2222"
    yield "it is an IPv6 address without brackets", f"Write {written}, or whichever port it has"


def _host_faults(host: str) -> Iterator[tuple[str, str]]:
    if not host:
        yield "the host before the port is empty", "Write host:port, such as 192.0.2.1:2222"
    elif not _HOST.fullmatch(host):
        wrong = _HOST.sub("", host)[0]
        yield f"the host {host[:60]!r} holds {wrong!r}", "Write a host's name or address as it is, then :port"


def _port_faults(colon: str, port: str, host: str) -> Iterator[tuple[str, str]]:
    example = f"{host[:60]}:2222" if host else "192.0.2.1:2222"
    if not colon or (colon == ":" and not port):
        yield "the port is missing", f"Write host:port, such as {example}"
    elif colon != ":" or not (port.isascii() and port.isdigit()):
        yield f"the port {port[:60]!r} is not a number", f"Write a number from 1 to 65535, such as {example}"
    elif len(port) > 9 or not 1 <= int(port) <= 65535:
        yield f"there is no port {port[:60]}", f"Write a number from 1 to 65535, such as {example}"


def _ipv6(host: str) -> ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(host)
    except ValueError:
        return None
