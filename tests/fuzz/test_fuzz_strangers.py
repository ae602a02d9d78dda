"""Programs that don't belong come to the ports at which a job listens; it goes on, and those that belong come in.

They are a process of their own, `visits`, with hard limits, and come by this machine's loopback only.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import resource
import selectors
import socket
import subprocess
import sys
import time

import limits
import pytest
import visits
from fuzzing import CASES

from toolkit import __version__
from toolkit.cluster import Cluster, split, wait_for_tasks
from toolkit.errors import LaunchError
from toolkit.launch import JobSpec
from toolkit.launch.agent.program import Reports
from toolkit.launch.backends import rendezvous
from toolkit.launch.events import event, line
from toolkit.launch.spec import Host

SEEDS = range(max(1, CASES // 100))


@pytest.fixture
def few_descriptors():
    """Leaves this process sixty more descriptors, of which strangers may have a part."""
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in held)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 60, None)), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def strangers(port, seed):
    """Strangers come to a port where somebody listens, until the end of the block."""
    command = [sys.executable, pathlib.Path(visits.__file__), str(port), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(spec):
    """A launcher that belongs to the job; returns its connection, after the proof."""
    connection = socket.create_connection(split(spec.rendezvous), timeout=30)
    lines = connection.makefile("rb")
    number = json.loads(lines.readline())["nonce"]
    proof = rendezvous._proof(os.environ[rendezvous.TOKEN], "joiner", number, "mine")
    facts = {"version": __version__, "nodes": 2, "program": rendezvous.program_of(spec), "host": "other"}
    connection.sendall(line(event("hello", nonce="mine", proof=proof, room=1, **facts)))
    assert json.loads(lines.readline())["event"] == "welcome"
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("few_descriptors")
def test_a_rendezvous(seed, monkeypatch):
    monkeypatch.setenv(rendezvous.TOKEN, "a token of the test's own")
    spec = JobSpec(command=("train.py",), nodes=2, rendezvous=f"127.0.0.1:{free_port()}", start_timeout=60.0)
    listener, said = rendezvous.listen(spec), []
    with concurrent.futures.ThreadPoolExecutor() as pool, strangers(split(spec.rendezvous)[1], seed) as process:
        made = pool.submit(rendezvous.RendezvousBackend, spec, listener, [], said.append)
        assert process.stdout.readline() == b"there\n"
        connection = join(spec)
        backend = made.result(60)
        host, seat = Host("other", 1), rendezvous._Seat(backend, event("prepare"))
        backend.seats.append((host, seat))
        seat.take(backend._first.pop(0)[0])
        deadline, most = time.monotonic() + 1.0, 0
        while time.monotonic() < deadline:
            assert seat.read() == []
            most = max(most, len(backend._coming))
        assert 0 < most < 30
        connection.sendall(line(event("looked", number=1)))
        deadline = time.monotonic() + limits.patient(10)
        while not (found := seat.read()):
            assert time.monotonic() < deadline
        assert found == [event("looked", number=1)]
        seat.close()
        backend.close(None)
        connection.close()
    assert len(said) < 20  # What strangers say isn't written down without end.


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("few_descriptors")
def test_tasks_that_wait_for_one_another(seed):
    cluster = Cluster({"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]})
    first, second = cluster.tasks
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(wait_for_tasks, cluster, first, timeout=30)
        with strangers(split(cluster.address(first))[1], seed) as process:
            assert process.stdout.readline() == b"there\n"
            wait_for_tasks(cluster, second, timeout=30)
            waits.result(30)


@pytest.mark.usefixtures("few_descriptors")
def test_reports():
    taken, selector = [], selectors.DefaultSelector()

    def pump():
        for _ in range(3):
            for key, _ in selector.select(0):
                key.data()

    reports = Reports(selector, lambda facts: taken.append(float(facts["at"])))
    channels, chance = [], random.Random(1)
    for number in range(20):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channels.append(channel)
        channel.connect(reports.path)
        for odd in (*(visits.words(chance)[:60_000] for _ in range(20)), json.dumps({"at": 10**400}).encode()):
            if odd:  # An empty message is the end.
                channel.send(odd)
            pump()
        channel.send(json.dumps({"at": number}).encode())
        pump()
    assert {float(number) for number in range(20)} <= set(taken)
    for channel in channels:
        channel.close()
    reports.close()
    selector.close()


def test_reports_where_descriptors_are_used_up():
    taken, selector = [], selectors.DefaultSelector()
    reports = Reports(selector, taken.append)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(reports.path)
    channel.send(b'{"state": "running"}')
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.dup(channel.fileno()))
        for _ in range(3):
            for key, _ in selector.select(0):
                key.data()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in used:
            os.close(each)
    assert taken == []
    for _ in range(3):
        for key, _ in selector.select(0):
            key.data()
    assert taken == [{"state": "running"}]
    channel.close()
    reports.close()
    selector.close()


@pytest.mark.slow
def test_a_listener_that_is_no_launcher_and_sends_without_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def floods(server):
        connection, _ = server.accept()
        sent = 0
        with connection, contextlib.suppress(OSError):
            while sent < 256 << 20:
                sent += connection.send(b"x" * (1 << 20))
        server.close()
        return sent

    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        sent = pool.submit(floods, server)
        spec = JobSpec(command=("train.py",), nodes=2, rendezvous=f"127.0.0.1:{server.getsockname()[1]}")
        spec = dataclasses.replace(spec, start_timeout=2.0)
        with pytest.raises(LaunchError):
            rendezvous.join(spec, [])
        assert sent.result(60) < 64 << 20  # What the system's own buffers hold.
