"""Machines for which a plan is made: the speed of devices, and bandwidth and latency of links."""

import dataclasses
import math
import re
from collections.abc import Mapping

from toolkit.errors import StrategyError

__all__ = ["DEVICES", "LEAST_STEP", "Link", "Machine", "bandwidth", "device"]

# Makers' data sheets: float32 operations per second without tensor cores, and bytes per second of memory.
DEVICES: dict[str, tuple[float, float]] = {
    "K20": (3.52e12, 208e9),
    "P100": (9.3e12, 732e9),
    "V100": (14e12, 900e9),
    "T4": (8.1e12, 320e9),
    "RTX3090": (35.6e12, 936e9),
    "A100": (19.5e12, 1555e9),
    "L4": (30.3e12, 300e9),
    "RTX4090": (82.6e12, 1008e9),
    "H100": (67e12, 3350e9),
    "H200": (67e12, 4800e9),
}
# The share of a data sheet's operations that convolutions reach in training. It is an assumption, and results say so.
_REACHED = 0.5
# Seconds in which `fit` starts the operations of a step, however small it is. It is an assumption, too.
LEAST_STEP = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between replicas.

    Attributes:
        bandwidth: Bytes a second in each direction.
        latency: Seconds that a message takes however short it is.
        reducing: Bytes a second at which a replica receives gradients that are summed on the way; None for bandwidth.
        smallest: Seconds that an all-reduce of gradients takes however few they are.
    """

    bandwidth: float
    latency: float = 0.0
    reducing: float | None = None
    smallest: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and the network between them.

    Attributes:
        name: In words.
        speed: Operations a second of a device; math.nan where `seconds` has each layer's time.
        memory: Bytes a second that an optimizer reads and writes weights at; math.inf to leave that out.
        inside: What joins replicas of a host.
        between: What joins hosts, shared by a host's replicas; None for a link like `inside`.
        hosts: How many there are, among which replicas are divided evenly.
        seconds: Measured seconds of a training step for one example, by layer.
        fixed: Seconds of a step beside its layers.
    """

    name: str = "a machine"
    speed: float
    inside: Link
    between: Link | None = None
    hosts: int = 1
    memory: float = math.inf
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fixed: float = 0.0

    def exchange_seconds(self, received: float, rounds: int, *, replicas: int) -> float:
        """Returns how long an exchange takes on its slowest link, inside a host or between hosts.

        Args:
            received: Bytes that a replica receives.
            rounds: Messages that wait for one another.
            replicas: How many exchange.
        """
        return max(
            share * received / link.bandwidth + rounds * link.latency
            for link, share in self._ways(replicas, ring=False)
        )

    def all_reduce_seconds(self, received: float, rounds: int, *, replicas: int) -> float:
        """Returns the time of an all-reduce of gradients, without the latency of messages (rounds=0) or with it."""
        return max(
            received / (link.reducing or link.bandwidth)
            + (max(rounds * link.latency, link.smallest) if rounds else 0.0)
            for link, _ in self._ways(replicas, ring=True)
        )

    def _ways(self, replicas: int, *, ring: bool) -> list[tuple[Link, float]]:
        """The links of a replica's exchange, each with its bytes for each byte that a replica receives.

        A ring passes from host to host once, whatever the number of replicas there. What everybody sends to everybody
        comes, for each of a host's replicas, from all replicas of other hosts.
        """
        hosts = min(self.hosts, replicas)
        if hosts <= 1:
            return [(self.inside, 1.0)]
        local = math.ceil(replicas / hosts)
        outside = 1.0 if ring else local * (replicas - local) / (replicas - 1)
        ways = [(self.between or self.inside, outside)]
        if local > 1:
            ways.append((self.inside, 1.0 if ring else (local - 1) / (replicas - 1)))
        return ways


def device(text: str) -> tuple[str, float, float]:
    """Returns (name, operations per second, bytes per second of memory) of a device.

    Args:
        text: A name of DEVICES, or billions of operations a second that it reaches, such as "500" or "500GFLOPS".
            Of a data sheet's figure half is taken; a number is taken as it is.

    Raises:
        StrategyError: It is neither.
    """
    known = {name.lower(): name for name in DEVICES}
    if name := known.get(text.lower().replace(" ", "")):
        speed, memory = DEVICES[name]
        return f"{name} at {_REACHED:.0%} of its {speed / 1e12:g} TFLOPS", speed * _REACHED, memory
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([GT])FLOPS)?", text.strip(), re.IGNORECASE)
    speed = _number(match[1]) if match else 0.0
    if not match or not 0 < speed < math.inf:
        raise StrategyError(
            asked=f"device {text!r}",
            found="it is neither a device known here nor a number of GFLOPS",
            remedy="Give one of " + ", ".join(DEVICES) + ", or such as 500 (billions of operations a second)",
        )
    billions = speed * (1000 if (match[2] or "G").upper() == "T" else 1)
    return f"{billions:,g} GFLOPS", billions * 1e9, math.inf


def bandwidth(text: str, *, what: str = "bandwidth") -> float:
    """Parses bytes, per second or of memory, such as "1Gbit", "100 Mbit/s", "16GB/s" or "12GiB".

    Raises:
        StrategyError: It isn't so many, or has no unit.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)(bit|b|B)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    size = _number(match[1]) if match else 0.0
    if not match or not 0 < size < math.inf:
        plain = re.fullmatch(r"[0-9.]+\s*[kmgtKMGT]?", text.strip())
        raise StrategyError(
            asked=f"{what} {text!r}",
            found="it has no unit: bits or bytes" if plain else f"that isn't a {what}",
            remedy="Give a number with a unit: 1Gbit for a network, 16GB for memory, or 16GB for PCIe (per second)",
        )
    prefix = match[2].lower()
    unit = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    return size * unit / (1 if match[3] == "B" or (match[3] == "b" and prefix.endswith("i")) else 8)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
