"""A step's time, and the bytes that the network brought."""

import itertools
import time

import psutil
import pytest

from toolkit.cluster import Cluster, Membership, Task
from toolkit.training import StepTimer
from toolkit.training.step_time import interface


def member(addresses):
    return Membership(cluster=Cluster({"worker": addresses}), task=Task("worker", 0), source="a test")


def steps(meter, count):
    meter.on_epoch_begin(0)
    for batch in range(count):
        meter.on_train_batch_end(batch)
    meter.on_epoch_end(0)


def test_steps_after_the_warm_up_are_timed_within_epochs():
    meter = StepTimer(warm_up=2)
    assert meter.seconds is None
    steps(meter, 3)
    assert meter.seconds is None, "one end is no interval"
    time.sleep(0.2)  # Between epochs is in no step.
    steps(meter, 3)
    assert 0 < meter.seconds < 0.1
    assert meter.received is None


def test_tasks_on_loopback_share_its_bytes(monkeypatch):
    meter = StepTimer(member(["127.0.0.1:1001", "127.0.0.1:1002"]), warm_up=1)
    counted = itertools.count(1000, 600)
    name = interface("127.0.0.1:1001")
    fake = psutil.net_io_counters()
    monkeypatch.setattr(
        psutil, "net_io_counters", lambda pernic: {name: fake._replace(bytes_recv=next(counted))} if pernic else fake
    )
    steps(meter, 5)
    assert meter.received == 300


@pytest.mark.parametrize("address", ["127.0.0.1:2222", "localhost:2222", "127.0.0.5:1"])
def test_the_interface_of_an_address(address):
    assert psutil.net_if_stats()[interface(address)].isup


def test_an_address_of_another_host_has_no_interface_here():
    assert interface("192.0.2.77:2222") is None
