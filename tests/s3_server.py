"""A real S3 interface over HTTP on this machine, and a network before it that refuses, delays and cuts."""

import contextlib
import logging
import socket
import threading
import time
import urllib.request
import uuid

import pytest

DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
HEAD = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


class Network:
    """Relays connections to a server. Its attributes may be changed at any moment.

    Attributes:
        refuses: Answers each request with "access denied".
        delay: Seconds before each piece of an answer.
        cut: Bytes after which a connection's request is cut; None for never.
        cuts: How often it was.
    """

    def __init__(self, port):
        self.refuses, self.delay, self.cut, self.cuts = False, 0.0, None, 0
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = set()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def drop(self):
        """Ends all connections."""
        for each in list(self._open):
            _end(each)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near):
        far = socket.create_connection(self._to)
        self._open |= {near, far}
        threading.Thread(target=self._answers, args=(far, near), daemon=True).start()
        sent = 0
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 14):
                if self.refuses:
                    near.sendall(HEAD % len(DENIED) + (b"" if data.startswith(b"HEAD") else DENIED))
                    break
                sent += len(data)
                if self.cut is not None and sent > self.cut:
                    self.cuts += 1
                    break
                far.sendall(data)
        _end(near)
        _end(far)
        self._open -= {near, far}

    def _answers(self, far, near):
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                time.sleep(self.delay)
                near.sendall(data)
        _end(near)


def _end(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Bucket:
    """An empty bucket.

    Attributes:
        name: Its name.
        url: Its URL for fsspec.
        network: The `Network` before its server.
    """

    def __init__(self, name, network):
        self.name, self.url, self.network = name, f"s3://{name}", network


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("s3fs", reason="no s3fs: pip install '.[test]'")
    pytest.importorskip("moto.server", reason="no moto, which serves S3: pip install '.[test]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # A line for each request.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """A bucket, which fsspec's s3:// finds by the environment, as a user's would."""
    network = Network(s3_server)
    for name, value in {
        "AWS_ENDPOINT_URL": network.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(urllib.request.Request(f"http://127.0.0.1:{s3_server}/{name}", method="PUT"), timeout=10).close()
    yield Bucket(name, network)
    network.close()
