"""Whom the servers of a launched job are open to."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
import two_hosts
from processes import ROOT, launch

from toolkit.launch import JobSpec
from toolkit.launch.agent import isolation


def possible():
    return not isolation._impossible()


needed = pytest.mark.skipif(not possible(), reason=f"no network namespaces here: {isolation._impossible()}")


def script(folder, text):
    (folder / "script.py").write_text(textwrap.dedent(text))
    return "script.py"


@pytest.mark.slow
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
    done = launch(tmp_path, "--isolate=fully", script(tmp_path, code))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all      | reached" in done.stdout
    assert "launch: 2 tasks here in a network of their own without connections to other machines; logs" in done.stdout


@pytest.mark.slow
@needed
def test_a_task_that_wanted_out_is_told_how(tmp_path):
    text = "import socket\nsocket.create_connection(('192.0.2.1', 80))"
    done = launch(tmp_path, "--isolate=fully", script(tmp_path, text))
    assert done.returncode == 1
    assert "Network is unreachable" in done.stderr
    assert "launch without it if they need them" in done.stderr


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
    assert "all      | reached" in done.stdout
    assert "network" not in done.stdout


THERE_AND_BACK = """
import ctypes, encodings.idna, os, socket, sys
from toolkit.launch import JobSpec
from toolkit.launch.agent import isolation
if sys.argv[1] == "pasta":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as a program that this user has started.
print(isolation.enter(JobSpec(command=("train.py",), isolate="yes")))
with socket.create_connection((sys.argv[2], 8123), 10):
    print("reached")
with socket.create_server(("", 8124)) as inside:
    inside.settimeout(2)
    print("listens", flush=True)
    try:
        inside.accept()
        print("somebody came in")
    except TimeoutError:
        print("nobody came in")
"""


@pytest.mark.slow
@needed
@pytest.mark.skipif(os.geteuid() != 0, reason="two hosts and another user are root's to make")
@pytest.mark.parametrize("program", ["pasta", "slirp4netns"])
def test_isolated_tasks_have_a_way_out_and_nobody_comes_in(program):
    """By pasta as a user, by slirp4netns as root."""
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine: apt-get install passt slirp4netns")
    if program == "pasta" and not os.stat("/dev/net/tun").st_mode & 0o002:
        pytest.skip("users may not use /dev/net/tun here")
    with two_hosts.made() as names, socket_in(names[1]):
        # A machine with an address that another can reach, and a server on that other.
        two_hosts.ip("-n", names[0], "route", "add", "default", "via", two_hosts.ADDRESSES[1])
        process = subprocess.Popen(
            ["ip", "netns", "exec", names[0], sys.executable, "-c", THERE_AND_BACK, program, two_hosts.ADDRESSES[1]],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text = ""
        while "listens" not in text and (line := process.stdout.readline()):
            text += line
        knock = f"import socket; socket.create_connection(('{two_hosts.ADDRESSES[0]}', 8124), 2)"
        knocked = subprocess.run(
            ["ip", "netns", "exec", names[1], sys.executable, "-c", knock], capture_output=True, timeout=30
        )
        text += process.communicate(timeout=60)[0]
    assert "in a network of their own, closed to others" in text
    assert "reached" in text
    assert "nobody came in" in text
    assert knocked.returncode != 0


@contextlib.contextmanager
def socket_in(name):
    """Somebody who listens at port 8123 of a namespace."""
    code = "import socket, time; s = socket.create_server(('', 8123)); print(flush=True); time.sleep(100)"
    listener = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        listener.stdout.readline()
        yield
    finally:
        listener.kill()
        listener.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--isolate=sometimes"], "there is no such choice. Choose no, yes, fully"),
        (["--isolate", "--host=192.0.2.7"], "tasks on other machines must reach them"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, flags, said):
    done = launch(tmp_path, *flags, script(tmp_path, ""))
    assert done.returncode == 2
    assert said in done.stderr


ISOLATED = JobSpec(command=("train.py",), isolate="fully")


def test_a_system_that_does_not_allow_it(monkeypatch):
    monkeypatch.setattr(isolation, "_impossible", lambda: "operation not permitted")
    with pytest.raises(isolation.LaunchError, match="this system doesn't allow it .operation not permitted"):
        isolation.enter(ISOLATED)


def test_a_first_use_of_cuda_is_not_kept_from_making_its_device(monkeypatch):
    monkeypatch.setattr(isolation.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(isolation.os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    with pytest.raises(isolation.LaunchError, match="/dev/nvidia-uvm isn't there yet"):
        isolation.enter(ISOLATED)


@pytest.mark.slow
@needed
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else is root's")
def test_a_user_without_rights_can_have_it_too():
    code = (
        "import ctypes, os\n"
        "from toolkit.launch.agent import isolation\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "ctypes.CDLL(None).prctl(4, 1)\n"  # PR_SET_DUMPABLE: as a program that this user has started.
        "from toolkit.launch import JobSpec\n"
        "said = isolation.enter(JobSpec(command=('train.py',), isolate='fully'))\n"
        "devices = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]\n"
        "print(os.getuid(), devices, said)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if "doesn't allow it" in done.stderr:
        pytest.skip("users can't make namespaces here")
    assert done.stdout.startswith("65534 ['lo'] "), done.stdout + done.stderr


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
    assert "--isolate closes these ports" in done.stdout


@pytest.mark.slow
def test_public_addresses_are_refused_unless_they_are_meant(tmp_path):
    (tmp_path / "public.json").write_text('{"cluster": {"worker": ["8.8.8.8:2222", "8.8.4.4:2222"]}}')
    flags = ["--cluster=public.json", "--task=worker:0", "--dry_run"]
    done = launch(tmp_path, *flags, script(tmp_path, ""), tasks=())
    assert done.returncode == 2
    assert "worker:0 is to listen at 8.8.8.8, port 2222, but that is a public address" in done.stderr
    assert launch(tmp_path, "--open_network", *flags, "script.py", tasks=()).returncode == 0
