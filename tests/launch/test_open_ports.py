"""Whom the servers of a launched job are open to."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import two_hosts
from processes import ROOT, launch, launch_apart


def script(folder, text):
    (folder / "script.py").write_text(textwrap.dedent(text))
    return "script.py"


@pytest.mark.slow
def test_the_security_pages_namespace_lets_tasks_reach_one_another_and_nobody_else(tmp_path):
    code = """
    import json, os, psutil, socket
    found = [name for name, addresses in psutil.net_if_addrs().items()]
    assert found == ["lo"], found
    config = json.loads(os.environ["TF_CONFIG"])
    host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", int(port)))
        server.listen()
        client.connect((host, int(port)))
    print("reached")
    """
    done = launch_apart(tmp_path, "--workers=2", script(tmp_path, code))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| reached" in done.stdout


@pytest.mark.slow
def test_the_default_is_the_machines_network(tmp_path):
    """A database on localhost, a download, Weights & Biases: what works without the launcher works with it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))\nprint('reached')"
        done = launch(tmp_path, script(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert "| reached" in done.stdout


SERVER = """
import json, os, socket, time
from toolkit.support import status
config = json.loads(os.environ["TF_CONFIG"])
port = int(config["cluster"]["worker"][config["task"]["index"]].split(":")[1])
with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("", port))
    server.listen()
    print(f"<{port}>", flush=True)
    status.report(strategy="multi_worker")
    time.sleep(1)
"""


@pytest.mark.slow
def test_open_ports_are_named_from_the_sockets_themselves(tmp_path):
    with two_hosts.made() as names:
        flags = ["--workers=1", script(tmp_path, SERVER)]
        done = subprocess.run(
            ["ip", "netns", "exec", names[0], sys.executable, "-m", "toolkit", "launch", *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    port = done.stdout.partition("<")[2].partition(">")[0]
    assert f"note: other machines can reach worker:0's port {port} of this machine at 10.177.0.1" in done.stdout
    assert "Close these ports to other machines (SECURITY.md says how)" in done.stdout


@pytest.mark.slow
def test_public_addresses_are_refused_unless_they_are_meant(tmp_path):
    (tmp_path / "public.json").write_text('{"cluster": {"worker": ["8.8.8.8:2222", "8.8.4.4:2222"]}}')
    flags = ["--cluster=public.json", "--task=worker:0", "--dry_run"]
    done = launch(tmp_path, *flags, script(tmp_path, ""), tasks=())
    assert done.returncode == 2
    assert "worker:0 is to listen at 8.8.8.8, port 2222, but that is a public address" in done.stderr
    assert launch(tmp_path, "--open_network", *flags, "script.py", tasks=()).returncode == 0
