"""Whom the servers of a launched job are open to."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import two_hosts
from processes import ROOT, launch

from toolkit.launch import isolation


def possible():
    return not isolation._impossible()


needed = pytest.mark.skipif(not possible(), reason=f"no network namespaces here: {isolation._impossible()}")


def script(folder, text):
    (folder / "script.py").write_text(textwrap.dedent(text))
    return "script.py"


@needed
def test_tasks_reach_one_another_and_nobody_else(tmp_path):
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
    done = launch(tmp_path, script(tmp_path, code))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reached") == 2
    assert (
        "launch: 2 tasks here in a network of their own without a way out (--isolate=never: this machine's); logs"
        in done.stdout
    )


@pytest.mark.slow
@needed
def test_a_task_that_wanted_out_is_told_how(tmp_path):
    done = launch(tmp_path, script(tmp_path, "import socket\nsocket.create_connection(('192.0.2.1', 80))"))
    assert done.returncode == 1
    assert "Network is unreachable" in done.stderr
    assert "launch with --isolate=never if that is what they miss" in done.stderr


@pytest.mark.slow
def test_never_leaves_the_machines_network(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))\nprint('reached')"
        done = launch(tmp_path, "--isolate=never", script(tmp_path, code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached") == 2
    assert "network" not in done.stdout


@pytest.mark.slow
def test_an_argument_that_names_an_address_keeps_the_machines_network(tmp_path):
    done = launch(tmp_path, script(tmp_path, ""), "--data=gs://bucket/data")
    assert done.returncode == 0
    assert "in this machine's network, because --data=gs://bucket/data may be elsewhere" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--isolate=sometimes"], "there is no such choice. Choose auto, always, never"),
        (["--isolate=always", "--host=192.0.2.7"], "they are to be reached from other machines"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, flags, said):
    done = launch(tmp_path, *flags, script(tmp_path, ""))
    assert done.returncode == 2
    assert said in done.stderr


def test_a_system_that_does_not_allow_it(monkeypatch):
    monkeypatch.setattr(isolation, "_impossible", lambda: "operation not permitted")
    isolated, said = isolation.enter("auto", command=["train.py"])
    assert not isolated
    assert "one of their own isn't possible here (operation not permitted)" in said
    with pytest.raises(isolation.LaunchError, match="this system doesn't allow it"):
        isolation.enter("always", command=["train.py"])


def test_a_first_use_of_cuda_is_not_kept_from_making_its_device(monkeypatch):
    monkeypatch.setattr(isolation.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(isolation.os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    isolated, said = isolation.enter("auto", command=["train.py"])
    assert not isolated
    assert "because /dev/nvidia-uvm isn't there yet" in said


@needed
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else is root's")
def test_a_user_without_rights_can_have_it_too():
    code = (
        "import ctypes, os\n"
        "from toolkit.launch import isolation\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "ctypes.CDLL(None).prctl(4, 1)\n"  # PR_SET_DUMPABLE: as a program that this user has started.
        "done, said = isolation.enter('auto', command=['train.py'])\n"
        "devices = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]\n"
        "print(done, os.getuid(), devices, said)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if "isn't possible" in done.stdout:
        pytest.skip("users can't make namespaces here")
    assert done.stdout.startswith("True 65534 ['lo'] "), done.stdout + done.stderr


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
        flags = ["--isolate=never", "--workers=1", script(tmp_path, SERVER)]
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
    assert f"note: worker:0's port {port}: open to whoever reaches this machine at 10.177.0.1" in done.stdout


def test_public_addresses_are_refused_unless_they_are_meant(tmp_path):
    (tmp_path / "public.json").write_text('{"cluster": {"worker": ["8.8.8.8:2222", "8.8.4.4:2222"]}}')
    flags = ["--cluster=public.json", "--task=worker:0", "--dry_run"]
    done = launch(tmp_path, *flags, script(tmp_path, ""), tasks=())
    assert done.returncode == 2
    assert "worker:0 is to listen at 8.8.8.8, port 2222, but that is a public address" in done.stderr
    assert launch(tmp_path, "--open_network", *flags, "script.py", tasks=()).returncode == 0
