"""What hosts are given by ssh: nothing here calls a host."""

import os
import signal
import subprocess
import sys
import threading
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.main import main
from toolkit.cluster import Task
from toolkit.errors import JobStopped
from toolkit.launch import JobSpec, events
from toolkit.launch.agent.connection import StartedAgent
from toolkit.launch.backends.ssh import SshBackend
from toolkit.launch.spec import Host
from toolkit.launch.supervisor import agents


def printed(capsys, *flags):
    with pytest.raises(SystemExit) as end:
        main(["launch", *flags])
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on=ssh:a,b", "--workers=3"], "the job has 3 tasks, but the hosts of --on=ssh have room for 2"),
        (["--on=ssh:a", "--cluster=x"], "--cluster, but it applies only with --on=local"),
        (["--on=ssh:a", "--nodes=3"], "--nodes, but it applies only with --on=local or sge or slurm"),
        (["--on=ssh:a,b", "--show=worker:9"], "--show=worker:9 shows that task's lines, but the tasks started here"),
        (["--min_workers=1", "--workers=2"], "--min_workers, but it applies only with --on=ssh"),
        (["--on=ssh:8.8.8.8,8.8.4.4"], "that is a public address"),
        (["--on=ssh:localhost,10.0.0.1"], "localhost means another machine there"),
    ],
)
def test_what_cannot_be_is_said(capsys, flags, said):
    code, output = printed(capsys, "--dry_run", *flags, "train.py")
    assert code == 2
    assert said in output.err


def test_a_dry_run_says_who_does_what(capsys, monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2")
    flags = ["--on=ssh:10.0.0.1:2,10.0.0.2:2", "--chief", "--workers=2", "--ps=1", "--directory=/it's here"]
    more = ["--python=/p", "--env=MY_API_TOKEN", "--env=A=b"]
    command = ["-m", "mine", "--flag=a b", "--url=x@hunter2hunter2", "--api_token=secret"]
    code, output = printed(capsys, "--dry_run", *flags, *more, *command)
    assert code == 0
    shown = "env 'MY_API_TOKEN=***' A=b /p -m mine '--flag=a b' '--url=x@***' '--api_token=***'"
    assert output.out.splitlines() == [
        f"# 10.0.0.1, 10.0.0.1, in /it's here: chief:0, worker:0: {shown}",
        f"# 10.0.0.2, 10.0.0.2, in /it's here: worker:1, ps:0: {shown}",
    ]


def test_workers_are_numbered_anew_where_hosts_are_gone():
    a, _, c = hosts = (Host("a", 2), Host("b"), Host("c"))
    addresses = {host: f"10.0.0.{number}" for number, host in enumerate(hosts)}
    cluster, tasks = agents.assign((), hosts, addresses, {a: [7, 8], c: [9]})
    assert cluster.as_dict() == {"worker": ["10.0.0.0:7", "10.0.0.0:8", "10.0.0.2:9"]}
    assert tasks == {Task("worker", 0): a, Task("worker", 1): a, Task("worker", 2): c}


@pytest.mark.parametrize(
    ("least", "shared", "ready", "enough"),
    [
        (0, True, "a", False),
        (1, True, "b", True),
        (2, True, "b", True),  # b has room for two.
        (2, True, "a", False),
        (1, False, "b", False),  # The run directory is on a.
        (1, False, "a", True),
    ],
)
def test_a_job_goes_on_with_enough_workers_and_with_its_run_directory(least, shared, ready, enough):
    spec = JobSpec(command=("train.py",), on="ssh:a,b:2", min_workers=least)
    made = agents.Agents(spec, types.SimpleNamespace(hosts=spec.hosts), [])
    made._shared = shared
    assert made._enough([host for host in spec.hosts if host.name == ready]) == enough


def test_ssh_asks_nothing_and_reads_the_configuration_that_is_named(tmp_path):
    (tmp_path / "my config").write_text("")
    spec = JobSpec(command=("train.py",), on="ssh:10.0.0.1", ssh_config=str(tmp_path / "my config"))
    command = SshBackend(spec, mark="").command()
    assert command[:3] == ["ssh", "-F", str(tmp_path / "my config")]
    assert "BatchMode=yes" in command


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 60), max_size=4))
def test_events_come_whole_whatever_else_is_on_the_line(noise, cuts):
    sent = events.line(events.event("note", text="a\nb"))
    stream = b"".join(part.replace(b"\n", b"") + b"\n" + sent for part in noise)
    reader, found, last = events.Reader(), [], 0
    for cut in sorted({*cuts, len(stream)}):
        found += reader.events(stream[last:cut])
        last = cut
    assert len([each for each in found if each.get("text") == "a\nb"]) == len(noise)


@given(st.binary())
def test_bytes_that_are_no_text_come_through(data):
    (found,) = events.Reader().events(events.line(events.event("output", text=events.text(data))))
    assert events.data(found["text"]) == data


@pytest.mark.slow
def test_a_signal_while_files_are_copied_stops_it(tmp_path, monkeypatch):
    for name, body in (("rsync", "exec sleep 60"), ("ssh", "echo hostname 10.0.0.1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = SshBackend(JobSpec(command=("train.py",), on="ssh:a", copy_to="/x"), mark="")
    received = []
    threading.Timer(0.5, lambda: received.append(signal.SIGINT)).start()
    with pytest.raises(JobStopped, match="Stopped by SIGINT"):
        place.copy(received)


@pytest.mark.slow
def test_rsync_is_given_an_ipv6_address_in_brackets(tmp_path, monkeypatch):
    (tmp_path / "rsync").write_text(f"#!/bin/sh\nfor word; do last=$word; done; echo $last > '{tmp_path}/last'\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho hostname ::1\n")
    for name in ("rsync", "ssh"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for host, target in (("me@[fd00::1]", "me@[fd00::1]:/x/"), ("[fd00::1]", "[fd00::1]:/x/"), ("a", "a:/x/")):
        SshBackend(JobSpec(command=("t",), on=f"ssh:{host}", copy_to="/x"), mark="").copy([])
        assert (tmp_path / "last").read_text().strip() == target


@pytest.mark.slow
def test_an_ssh_that_closes_its_output_and_lives_is_named(monkeypatch):
    agent = StartedAgent([sys.executable, "-c", "import os, time; os.close(1); time.sleep(60)"])
    monkeypatch.setattr(
        subprocess.Popen, "wait", lambda *_, **__: (_ for _ in ()).throw(subprocess.TimeoutExpired("ssh", 5))
    )
    while not agent.gone:
        agent.read()
    assert agent.last_line() == "its output was closed"
    monkeypatch.undo()
    agent.close()
