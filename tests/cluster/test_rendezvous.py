"""Tasks have a rendezvous before TensorFlow waits for ever; whoever is missing is named."""

import concurrent.futures
import logging
import socket
import subprocess
import sys
import threading
import time

import pytest

from toolkit.cluster import Cluster, Task, wait_for_tasks
from toolkit.errors import ClusterError
from toolkit.launch.agent.ports import HeldPorts


@pytest.fixture
def ports(monkeypatch):
    """Free ports, held for the test."""
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "1")
    with HeldPorts() as held:
        yield held


def cluster_of(ports, count, host="127.0.0.1"):
    return Cluster({"worker": [f"{host}:{ports.free()}" for _ in range(count)]})


def together(*calls):
    """Runs each call in a thread; returns what each returned or raised."""

    def outcome(call):
        try:
            return call()
        except ClusterError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_all_reach_one_another(ports, count, host):
    cluster = cluster_of(ports, count, host)
    assert together(*(lambda t=t: wait_for_tasks(cluster, t, timeout=20) for t in cluster.tasks)) == [None] * count


def test_a_task_alone_has_nobody_to_wait_for():
    wait_for_tasks(Cluster({"worker": ["192.0.2.1:1"]}), Task("worker", 0), timeout=0)


@pytest.mark.slow
def test_one_that_comes_late_is_waited_for_aloud(ports, caplog, monkeypatch):
    monkeypatch.setattr("toolkit.cluster.rendezvous._SAY_AFTER", 0.3)
    monkeypatch.setattr("toolkit.cluster.rendezvous._SAY_EVERY", 0.2)
    cluster = cluster_of(ports, 2)

    def late():
        time.sleep(1.5)
        wait_for_tasks(cluster, Task("worker", 1), timeout=20)

    with caplog.at_level(logging.WARNING, "toolkit"):
        assert together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=20), late) == [None, None]
    assert f"waiting for worker:1 at {cluster.address(Task('worker', 1))} (connection refused)" in caplog.text


def test_an_absent_peer_ends_in_a_sentence(ports):
    cluster = cluster_of(ports, 3)
    (error,) = together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=0.5))
    assert "2 could not be reached: worker:1 at" in str(error)
    assert "connection refused" in str(error)


def test_a_name_without_an_address_is_said(ports):
    cluster = Cluster({"worker": [f"127.0.0.1:{ports.free()}", "no-such-host.invalid:2222"]})
    (error,) = together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=0.5))
    assert "no-such-host.invalid:2222 (its name has no address)" in str(error)


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(monkeypatch):
    monkeypatch.delenv("TF_GRPC_REUSE_PORT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = Cluster({"worker": [f"127.0.0.1:{port}", "127.0.0.1:9"]})
        with pytest.raises(ClusterError, match=f"worker:0 listens on port {port}.*can't open that port"):
            wait_for_tasks(cluster, Task("worker", 0), timeout=5)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"x" * 5000, b"[]\n", b"{}\n"])
def test_a_stranger_on_the_port_is_no_peer(ports, answer):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.2)
        cluster = Cluster({"worker": [f"127.0.0.1:{ports.free()}", f"127.0.0.1:{stranger.getsockname()[1]}"]})
        done = threading.Event()

        def serve():
            while not done.is_set():
                try:
                    connection, _ = stranger.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        (error,) = together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=1))
        done.set()
        thread.join()
    assert "worker:1" in str(error)
    assert "another program answers there" in str(error) or "reset" in str(error)


@pytest.mark.slow
def test_workers_in_another_order_are_found_out(ports):
    one = cluster_of(ports, 2)
    other = Cluster({"worker": list(reversed(one.as_dict()["worker"]))})
    errors = together(
        lambda: wait_for_tasks(one, Task("worker", 0), timeout=2),
        lambda: wait_for_tasks(other, Task("worker", 0), timeout=2),
    )
    assert any("of another cluster" in str(error) for error in errors)


def test_the_same_index_twice_is_found_out(ports):
    cluster = cluster_of(ports, 2)
    # Both say that they are worker 0; the kernel gives each caller one of the two listeners.
    errors = together(*[lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=20)] * 2)
    assert any("another process has the same task" in str(error) for error in errors), errors
    assert all(isinstance(error, ClusterError) for error in errors)


def test_a_second_process_that_finds_its_port_taken_tells_the_first(ports, monkeypatch):
    cluster = cluster_of(ports, 2)

    def second():
        time.sleep(0.5)
        with monkeypatch.context() as unshared:
            unshared.setattr("toolkit.cluster.rendezvous.os.environ", {})
            wait_for_tasks(cluster, Task("worker", 0), timeout=20)

    errors = together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=20), second)
    assert ["another process has the same task" in str(error) for error in errors] == [True, True], errors


@pytest.mark.parametrize(
    ("theirs", "said", "remedy"),
    [
        ({"jobs": "20260102-1, attempt 1"}, "their jobs differ: 20260101-1, attempt 1 here", "earlier jobs"),
        ({"Keras versions": "3.9.0"}, "their Keras versions differ: 3.15.1 here, 3.9.0 there", "same versions"),
    ],
)
def test_a_task_of_another_job_or_version_is_refused_by_both(ports, theirs, said, remedy):
    cluster = cluster_of(ports, 2)
    mine = {"jobs": "20260101-1, attempt 1", "Keras versions": "3.15.1"}
    errors = together(
        lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=20, program=mine),
        lambda: wait_for_tasks(cluster, Task("worker", 1), timeout=20, program={**mine, **theirs}),
    )
    assert all(isinstance(error, ClusterError) for error in errors), errors
    assert said in str(errors[0])
    assert remedy in str(errors[1])


def test_what_only_one_knows_is_no_difference(ports):
    """A task that is started by hand, beside one that a launcher starts."""
    cluster = cluster_of(ports, 2)
    calls = [
        lambda n=n, given=given: wait_for_tasks(cluster, Task("worker", n), timeout=20, program=given)
        for n, given in enumerate([{"jobs": "20260101-1, attempt 1", "flags": ""}, {"flags": ""}])
    ]
    assert together(*calls) == [None, None]


def test_rubbish_sent_to_a_waiting_task_does_no_harm(ports):
    cluster = cluster_of(ports, 2)
    address = ("127.0.0.1", int(cluster.address(Task("worker", 0)).rpartition(":")[2]))

    def vandal():
        time.sleep(0.3)
        for rubbish in (
            b"",
            b"\n",
            b"{}\n",
            b"[" * 2000 + b"\n",
            b'{"task": 3}\n',
            b"\xff" * 9000,
            b'{"task": "worker:1"}\n',
        ):
            with socket.create_connection(address, timeout=2) as connection:
                connection.sendall(rubbish)
        wait_for_tasks(cluster, Task("worker", 1), timeout=20)

    assert together(lambda: wait_for_tasks(cluster, Task("worker", 0), timeout=20), vandal) == [None, None]


@pytest.mark.slow
def test_a_task_that_tensorflow_already_serves_counts_as_reached(ports):
    cluster = cluster_of(ports, 2)
    port = cluster.address(Task("worker", 1)).rpartition(":")[2]
    server = (
        "import tensorflow as tf, time\n"
        f"tf.distribute.Server({{'local': ['127.0.0.1:{port}']}}, job_name='local', task_index=0)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", server], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_tasks(cluster, Task("worker", 0), timeout=60)
        finally:
            process.kill()
