"""Measures a training step: its time, and the bytes received from the network."""

import itertools
import socket
import statistics
import time
from typing import Any

import keras
import psutil

from toolkit.cluster import Membership

__all__ = ["Meter", "interface"]


class Meter(keras.callbacks.Callback):
    """Measures the time from the end of one step to the end of the next, within an epoch.

    Args:
        member: Who this process is, by whose address its network interface is found; None where replicas share a
            process. Tasks that share an interface, as on loopback, count as many bytes each.
        warm_up: Steps at the beginning that don't count: the first ones trace and compile.
    """

    reads_weights = False

    def __init__(self, member: Membership | None = None, *, warm_up: int = 5) -> None:
        super().__init__()
        self._warm_up = warm_up
        self._interface, self._tasks = None, 1
        if member is not None:
            carriers = [interface(member.cluster.address(task)) for task in member.cluster.synchronous]
            self._interface = interface(member.cluster.address(member.task))
            self._tasks = carriers.count(self._interface)
        self._ends: list[float] = []
        self._received: list[int] = []
        self._took: list[float] = []
        self._seen = 0

    @property
    def seconds(self) -> float | None:
        """The median time of a step; None until two steps after the warm-up have ended."""
        return statistics.median(self._took) if self._took else None

    @property
    def received(self) -> float | None:
        """Bytes that a task receives in a step, with packet headers; None if no network is counted."""
        if len(self._received) < 2:
            return None
        return (self._received[-1] - self._received[0]) / (len(self._received) - 1) / self._tasks

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._ends, self._received = [], []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        self._ends.append(time.perf_counter())
        if self._interface:
            self._received.append(psutil.net_io_counters(pernic=True)[self._interface].bytes_recv)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._took += [after - before for before, after in itertools.pairwise(self._ends)]


def interface(address: str) -> str | None:
    """Returns the name of this host's network interface with an address, None if there is none.

    Args:
        address: HOST:PORT, or a host's name or address.
    """
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    if any(number.startswith("127.") for number in numbers):
        numbers.add("127.0.0.1")
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address in numbers for found in addresses):
            return name
    return None
