"""What a job by ssh may be, and what its hosts are given: nothing here calls a host."""

import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.main import main
from toolkit.cluster import Task
from toolkit.errors import LaunchError
from toolkit.launch.backends import ssh
from toolkit.launch.backends.ssh import assignment, wire
from toolkit.launch.backends.ssh.programs import ssh as ssh_command
from toolkit.launch.backends.ssh.start import _Launch


def request(hosts="a,b:2", **changes):
    asked = {"command": ("train.py",), "hosts": ssh.parse(hosts), "directory": "/d", "python": "/p"}
    return ssh.SshSpec(**{**asked, **changes})


def printed(capsys, *flags):
    with pytest.raises(SystemExit) as end:
        main(["launch", *flags])
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", [("a", 1)]),
        ("a,b:2", [("a", 1), ("b", 2)]),
        ("me@node-1.example:8", [("me@node-1.example", 8)]),
        ("10.0.0.1:2,[fd00::1]:3", [("10.0.0.1", 2), ("fd00::1", 3)]),
    ],
)
def test_hosts_are_names_with_numbers_of_tasks(text, meant):
    assert [(host.name, host.tasks) for host in ssh.parse(text)] == meant


@pytest.mark.parametrize(
    "text",
    ["", "a,", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a:0", "a:-1", "a:x", "a,a", "me@-x", "a\nb", "é", "a:99999"],
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(LaunchError, match="--hosts="):
        ssh.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_refused(text):
    try:
        hosts = ssh.parse(text)
    except LaunchError:
        return
    assert all(host.name and not host.name.startswith("-") and host.tasks > 0 for host in hosts)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hosts=a,b", "--workers=3"], "the jobs have 3 tasks together, but --hosts names room for 2"),
        (["--hosts=a,b", "--min_workers=3"], "--min_workers=3, but the hosts have room for 2 tasks"),
        (["--hosts=a:2,b", "--chief", "--workers=1", "--ps=1", "--min_workers=1"], "other tasks beside them"),
        (["--hosts=a", "--heartbeat_timeout=0"], "Give from 1 to 3600 seconds"),
        (["--hosts=a", "--grace=nan"], "that is no length of time"),
        (["--hosts=a", "--env=1A=x"], "that is no name of a variable"),
        (["--hosts=a", "--env=NO_SUCH_VARIABLE"], "it has no value here"),
        (["--hosts=a", "--cluster=x"], "--cluster, but it means nothing with --hosts"),
        (["--hosts=a", "--isolate=always"], "--isolate, but it means nothing with --hosts"),
        (["--hosts=a", "--nodes=3"], "--nodes, but it means nothing with --hosts"),
        (["--hosts=a", "--engine=slurm"], "--hosts says where they are"),
        (["--min_workers=1", "--workers=2"], "--min_workers, but it means nothing for tasks of this machine alone"),
        (["--engine=slurm", "--stall_timeout=3"], "--stall_timeout, but it means nothing with --engine=slurm"),
        (["--hosts=8.8.8.8,8.8.4.4"], "that is a public address"),
    ],
)
def test_what_cannot_be_is_said(capsys, flags, said):
    code, output = printed(capsys, "--dry_run", *flags, "train.py")
    assert code == 2
    assert said in output.err


def test_hosts_without_a_script_are_refused(capsys):
    code, output = printed(capsys, "--hosts=a")
    assert code == 2
    assert "none is named" in output.err


def test_a_dry_run_says_who_does_what(capsys):
    flags = [
        "--hosts=10.0.0.1:2,10.0.0.2:2",
        "--chief",
        "--workers=2",
        "--ps=1",
        "--directory=/it's here",
        "--python=/p",
    ]
    code, output = printed(capsys, "--dry_run", *flags, "-m", "mine", "--flag=a b")
    assert code == 0
    assert output.out.splitlines() == [
        "# 10.0.0.1, 10.0.0.1, in /it's here: chief:0, worker:0: /p -m mine '--flag=a b'",
        "# 10.0.0.2, 10.0.0.2, in /it's here: worker:1, ps:0: /p -m mine '--flag=a b'",
    ]


def test_workers_are_numbered_anew_where_hosts_are_gone():
    asked = request("a:2,b,c")
    addresses = {host: f"10.0.0.{number}" for number, host in enumerate(asked.hosts)}
    a, _, c = asked.hosts
    cluster, tasks = assignment.assign(asked, addresses, {a: [7, 8], c: [9]})
    assert cluster.as_dict() == {"worker": ["10.0.0.0:7", "10.0.0.0:8", "10.0.0.2:9"]}
    assert tasks == {a: (Task("worker", 0), Task("worker", 1)), c: (Task("worker", 2),)}


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
    asked = request("a,b:2", min_workers=least)
    launch = types.SimpleNamespace(spec=asked, shared=shared)
    assert _Launch._enough(launch, [host for host in asked.hosts if host.name == ready]) == enough


def test_ssh_asks_nothing_and_reads_the_configuration_that_is_named():
    command = ssh_command(request(ssh_config="/my config"))
    assert command[:3] == ["ssh", "-F", "/my config"]
    assert "BatchMode=yes" in command


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 60), max_size=4))
def test_messages_come_whole_whatever_else_is_on_the_line(noise, cuts):
    sent = wire.line("note", text="a\nb")
    stream = b"".join(part.replace(b"\n", b"") + b"\n" + sent for part in noise)
    reader, found, last = wire.Reader(), [], 0
    for cut in sorted({*cuts, len(stream)}):
        found += reader.messages(stream[last:cut])
        last = cut
    mine = [each for each in found if each.get("text") == "a\nb"]
    assert len(mine) == len(noise)
    assert all(json.dumps(each) for each in found)
