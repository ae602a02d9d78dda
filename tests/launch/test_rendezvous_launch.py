"""The same command on every host: they find one another at an address, without ssh."""

import base64
import json
import os
import pathlib
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

import limits
import processes
import pytest
import two_hosts

from toolkit import __version__
from toolkit.cli.main import main
from toolkit.cluster import split
from toolkit.launch import JobSpec, events
from toolkit.launch.backends import rendezvous
from toolkit.launch.backends.rendezvous import program_of
from toolkit.launch.spec import Host

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["TOOLKIT_ATTEMPT"], flush=True)
if sys.argv[1:] == ["raise"] and os.environ["RANK"] == "1":
    raise ValueError("no such column")
if sys.argv[1:] == ["one after the other"]:
    time.sleep(0 if os.environ["RANK"] == "1" else 5)
    sys.exit(0 if os.environ["RANK"] == "1" else 3)
if sys.argv[1:] == ["wait"]:
    while not os.path.exists("finish"):
        time.sleep(0.05)
"""


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []

    def launcher(address, *flags, nodes=2, command=("train.py",), cwd=tmp_path):
        process = subprocess.Popen(
            [*(sys.executable, "-m", "toolkit", "launch", "--show=all", f"--nodes={nodes}"),
             *(f"--rendezvous={address}", *flags, *command)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield launcher
    for process in started:
        process.kill()
        process.communicate()


def ends(*processes):
    """What each has printed, those that supervise first; and their exit codes."""
    texts = [process.communicate(timeout=60)[0] for process in processes]
    order = sorted(range(len(texts)), key=lambda number: "that launcher has the logs" in texts[number])
    return [texts[number] for number in order], [process.returncode for process in processes]


@pytest.mark.slow
def test_two_find_one_another_and_each_starts_its_tasks(start, address):
    (first, second), codes = ends(start(address, "--workers=3"), start(address, "--workers=3"))
    assert codes == [0, 0]
    assert "launch: 3 tasks on 2 hosts; logs in runs/" in first
    assert sorted(re.findall(r"rank (\d) of 3", first)) == ["0", "1", "2"]
    assert re.search(rf"launch: 1 task here of the job at {address}; that launcher has the logs", second)
    assert re.findall(r"rank (\d) of 3", second) == ["2"]
    assert "launch: done" in second


@pytest.mark.slow
def test_arguments_variables_and_paths_arrive_as_they_are(start, address, tmp_path):
    folder = tmp_path / "it's a $(touch ran) directory"
    folder.mkdir()
    (folder / "tell it's.py").write_text(processes.TELL)
    what = {"command": ("tell it's.py", *processes.ODD), "cwd": folder}
    texts, codes = ends(*(start(address, processes.ODD_ENV, **what) for _ in range(2)))
    assert codes == [0, 0], texts
    assert processes.told(folder)


@pytest.mark.slow
def test_a_failure_on_one_is_said_on_both(start, address):
    command = ("train.py", "raise")
    texts, codes = ends(start(address, command=command), start(address, command=command))
    assert codes == [1, 1]
    for text in texts:
        assert "worker:1 failed first: it ended with exit code 1" in text
        assert "ValueError: no such column" in text


@pytest.mark.slow
def test_a_failure_is_told_at_once_where_another_hosts_tasks_had_ended_before(start, address):
    flags = ("--heartbeat_timeout=60", "--grace=1")
    began = time.monotonic()
    texts, codes = ends(*(start(address, *flags, command=("train.py", "one after the other")) for _ in range(2)))
    assert "worker:0 failed first: it ended with exit code 3" in texts[0]
    assert codes == [3, 3] or sorted(codes) == [0, 3], texts
    limits.keep(time.monotonic() - began, 40)  # It isn't waited for a host that has left.


@pytest.mark.slow
def test_a_launcher_that_stood_still_says_so_and_blames_no_task(start, address):
    flags = ("--heartbeat_timeout=5", "--grace=1")
    first, other = pair = [start(address, *flags, command=("train.py", "wait")) for _ in range(2)]
    for process in pair:
        while "rank" not in (line := process.stdout.readline()):
            if "2 tasks on 2 hosts" in line:
                first, other = process, next(each for each in pair if each is not process)
    first.send_signal(signal.SIGSTOP)
    other.communicate(timeout=60)  # It has ended its tasks, and itself.
    first.send_signal(signal.SIGCONT)
    text = first.communicate(timeout=60)[0]
    assert "This launcher was suspended" in text
    assert "failed first" not in text
    assert first.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"nodes": 3}, "it has --nodes=3, not 2. Give every host the same number"),
        ({"command": ("train.py", "wait")}, "it starts another job: command or numbers of tasks differ"),
    ],
)
def test_who_does_not_belong_is_told_and_does_no_harm(start, address, other, said):
    first = start(address, "--start_timeout=20")
    while not listening(address):
        assert first.poll() is None
    (text,), (code,) = ends(start(address, "--start_timeout=20", **other))
    assert code == 2
    assert said in text
    texts, codes = ends(first, start(address))
    assert codes == [0, 0], texts


def listening(address):
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_a_host_that_never_comes_is_said_in_time(start, address):
    (text,), (code,) = ends(start(address, "--start_timeout=2"))
    assert code == 2
    assert f"2 hosts are to meet at {address}, but 1 came within 2 s" in text


@pytest.mark.slow
def test_an_address_where_nobody_or_somebody_else_listens(start):
    (text,), (code,) = ends(start("192.0.2.7:29400", "--start_timeout=2"))
    assert (code, "no launcher answered there for 2 s" in text) == (2, True), text
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        process = start(taken, "--start_timeout=5")
        connection, _ = server.accept()
        connection.recv(10)
        connection.sendall(b"HTTP/1.1 400 Bad Request\n")
        (text,), (code,) = ends(process)
        connection.close()
    assert (code, "a program that isn't a launcher of this toolkit answers there" in text) == (2, True), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes=2"], "the hosts need an address at which to meet"),
        (["--nodes=2", "--rendezvous=nowhere"], "--rendezvous=nowhere, but that isn't an address"),
        (["--nodes=2", "--rendezvous=no.such.host.invalid:1234"], "has no address here"),
        (["--nodes=2", "--rendezvous=a:1", "--cluster=x.json"], "--cluster describes the hosts already"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, flags, said):
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "launch", "--show=all", *flags, "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_either_ends_both(start, address, number):
    for which in (0, 1):
        both = [start(address, "--grace=3", command=("train.py", "wait")) for _ in range(2)]
        for process in both:
            while "rank" not in process.stdout.readline():
                assert process.poll() is None
        both[which].send_signal(number)
        _, codes = ends(*both)
        assert set(codes) == {128 + number}


@pytest.mark.fault
@pytest.mark.slow
def test_a_host_that_is_killed_comes_back(start, address, tmp_path):
    flags = ("--max_restarts=1", "--heartbeat_timeout=5", "--grace=2", "--workers=2")
    both = [start(address, *flags, command=("train.py", "wait")) for _ in range(2)]
    heads = [process.stdout.readline() for process in both]
    member = both[[("that launcher has the logs" in head) for head in heads].index(True)]
    chief = both[1 - both.index(member)]
    assert "rank" in member.stdout.readline()
    member.kill()
    again = start(address, *flags, command=("train.py", "wait"))
    while not re.search(r"rank 1 of 2 2", line := again.stdout.readline()):
        assert line or again.poll() is None
    (tmp_path / "finish").touch()
    (first, second), codes = ends(chief, again)
    assert codes == [0, 0], (first, second)
    assert "restart 1 of 1" in first


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="two network namespaces are root's to make")
@pytest.mark.parametrize("recipe", ["cifar_multi_worker", "cifar_parameter_server"])
def test_two_hosts_without_ssh_train_both_recipes(tmp_path, recipe, monkeypatch):
    counts = ["--chief", "--workers=2", "--ps=1"] if recipe.endswith("server") else []
    if counts:  # By the home directory that both share, or by the token that both are given.
        monkeypatch.setenv("TOOLKIT_TOKEN", "of both, and long")
    with two_hosts.made() as names:
        flags = [*counts, "--nodes=2", f"--rendezvous={two_hosts.ADDRESSES[0]}:29400", "-m", f"recipes.{recipe}"]
        what = ["--data=shapes", "--epochs=1", "--steps_per_epoch=4", "--run_dir=run"]
        both = [two_hosts.start(name, tmp_path, "toolkit", "launch", "--show=all", *flags, *what) for name in names]
        texts = two_hosts.finish(both, 150)
    assert [process.returncode for process in both] == [0, 0], texts
    assert len(set(re.findall(r"Done: .* weights (\w+)", texts[0]))) == 1
    assert "launch: done" in texts[1]


def exchanged(connection, *sent):
    """Sends events, and returns those that come until the other side hangs up or says no more for a second."""
    connection.settimeout(1)
    connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in sent))
    text = b""
    try:
        while piece := connection.recv(1 << 16):
            text += piece
    except (TimeoutError, ConnectionError):
        pass
    return [json.loads(line) for line in text.splitlines()]


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


@pytest.mark.slow
def test_whoever_lacks_the_token_is_sent_nothing_and_heard_of_nothing(start, address, tmp_path):
    first = start(address, "--start_timeout=20", "--env=MY_PASSWORD=hunter2hunter2")
    while not listening(address):
        assert first.poll() is None
    host, port = address.split(":")
    hello = {"event": "hello", "nodes": 2, "version": __version__, "host": "evil", "room": 1, "nonce": "0"}
    hello["program"] = program_of(JobSpec(command=("train.py",), nodes=2, rendezvous=address))
    data = base64.b64encode(pickle.dumps((True, Bomb()))).decode()
    claims = [{"event": "ready", "version": __version__, "host": "evil", "ports": [1], "shared": False}]
    claims += [
        {"event": "started", "task": "worker:0", "pid": 1},
        {"event": "result", "task": "worker:0", "data": data},
    ]
    for proof in ({}, {"proof": "0" * 64}, {"proof": None}):
        with socket.create_connection((host, int(port))) as connection:
            found = exchanged(connection, {**hello, **proof}, *claims)
        assert [each["event"] for each in found] == ["challenge", "refused"], found
        assert "it hasn't this job's token" in found[1]["found"]
    (token_file,) = (tmp_path / "state").glob("toolkit/rendezvous/*")
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    texts, codes = ends(first, start(address, "--env=MY_PASSWORD=hunter2hunter2"))
    assert codes == [0, 0], texts
    assert not list(tmp_path.rglob("exploded"))
    assert token_file.name not in [path.name for path in token_file.parent.iterdir()]


@pytest.mark.slow
def test_hosts_without_a_common_home_directory_are_given_the_token(start, address, tmp_path, monkeypatch):
    first = start(address, "--start_timeout=30")
    while not listening(address):
        assert first.poll() is None
    monkeypatch.setenv("TOOLKIT_TOKEN", "not this one")
    (text,), (code,) = ends(start(address, "--start_timeout=5"))
    assert (code, "it hasn't this job's token. Set TOOLKIT_TOKEN" in text) == (2, True), text
    (file,) = (tmp_path / "state").glob("toolkit/rendezvous/*")
    monkeypatch.setenv("TOOLKIT_TOKEN", file.read_text())
    (said, _), codes = ends(first, start(address))
    assert codes == [0, 0], said
    assert f"launch: 1 of 2 hosts at {address}, waiting for 1 more" in said
    assert file.name in said
    assert os.environ["TOOLKIT_TOKEN"] not in said, "a token isn't written into a file"


def test_a_machine_whose_name_means_itself_alone_listens_for_the_others(monkeypatch):
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1."""
    answer = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: [answer])
    listener = rendezvous.listen(JobSpec(command=("x",), nodes=2, rendezvous="my-own-name:29471"))
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_launcher_that_is_killed_as_it_joins_does_the_others_no_harm(address, monkeypatch):
    monkeypatch.setenv(rendezvous.TOKEN, "a token of the test's own")
    spec = JobSpec(command=("train.py",), rendezvous=address)
    backend = rendezvous.RendezvousBackend(spec, rendezvous.listen(spec), [], lambda _: None)
    host, seat = Host("other", 1), rendezvous._Seat(backend, {"event": "prepare"})
    backend.seats.append((host, seat))
    with socket.create_connection(split(address)) as joining:
        seat.read()
        number = json.loads(joining.makefile().readline())["nonce"]
        proof = rendezvous._proof(os.environ[rendezvous.TOKEN], "joiner", number, "mine")
        facts = {"version": __version__, "nodes": 1, "program": program_of(spec), "host": "other"}
        joining.sendall(events.line(events.event("hello", nonce="mine", proof=proof, room=1, **facts)))
        joining.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Close by a reset.
    seat.read()
    assert seat.gone
    assert backend.addresses[host] == "127.0.0.1"
    seat.close()
    backend.close(None)


@pytest.mark.slow
def test_who_is_awaited_in_the_background_can_be_given_up(start, address, tmp_path):
    process = start(address, "--detach")
    assert "1 of 2 hosts" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert (process.returncode, "Stopped by SIGINT; all tasks have ended." in text) == (130, True), text
    assert not listening(address)


def test_a_dry_run_says_that_addresses_are_chosen_later(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--dry_run", "--nodes=2", "--rendezvous=10.0.0.1:29400", "--env=A=b", "-m", "mine"])
    out = capsys.readouterr().out
    assert "# 2 hosts come together at 10.0.0.1:29400, where addresses and ports are chosen" in out
    assert "127.0.0.1" not in out
    assert f"\nenv A=b {sys.executable} -m mine\n" in out


@pytest.mark.slow
def test_who_comes_too_late_is_told_so_and_who_is_refused_is_named_at_once(start, address, tmp_path):
    first = start(address, "--workers=2", "--heartbeat_timeout=1", "--grace=1", command=("train.py", "wait"))
    while not listening(address):
        assert first.poll() is None
    (text,), (code,) = ends(start(address, "--workers=2", command=("other.py",)))
    assert (code, "it starts another job" in text) == (2, True), text
    second = start(address, "--workers=2", command=("train.py", "wait"))
    while "rank 1" not in second.stdout.readline():
        assert second.poll() is None
    (text,), (code,) = ends(start(address, "--workers=2", command=("train.py", "wait")))
    assert (code, "that job already has all its hosts" in text) == (2, True), text
    (tmp_path / "finish").touch()
    (said, _), codes = ends(first, second)
    assert codes == [0, 0], said
    assert re.search(r"^launch: the launcher on '.*' is refused, because it starts another job", said, re.MULTILINE)


@pytest.mark.slow
def test_a_program_that_listens_and_says_nothing_is_no_launcher(start, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(f"127.0.0.1:{server.getsockname()[1]}", "--start_timeout=60")
        connection, _ = server.accept()
        (text,), (code,) = ends(process)
        connection.close()
    assert (code, "a program that isn't a launcher of this toolkit answers there" in text) == (2, True), text
