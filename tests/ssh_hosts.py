"""Two hosts with an ssh server each, in network namespaces; and the configuration with which a user reaches them."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import time

import limits
import psutil
import two_hosts
from processes import ROOT, Job

PROGRAMS = ("ssh", "sshd", "ssh-keygen", "rsync")


def lacking():
    """Why there can be no such hosts here, or ""."""
    missing = [name for name in PROGRAMS if _found(name) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine: apt-get install openssh-server openssh-client rsync"
    return "" if os.geteuid() == 0 else "an ssh server in a namespace of its own is root's to start"


def _found(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


_SERVER = """
ListenAddress {address}
Port 2200
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/user_key.pub"
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
ClientAliveInterval 5
ClientAliveCountMax 3
"""

_USER = """
Host a b nobody
  Port 2200
  IdentityFile "{folder}/user_key"
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile "{folder}/known_hosts"
  LogLevel ERROR
Host a
  HostName {0}
Host b
  HostName {1}
Host nobody
  HostName 10.177.0.77
"""


class Hosts:
    """Hosts "a" and "b", by `config`; commands are run on a.

    Attributes:
        names: Of the two namespaces.
        config: A file for ssh -F.
    """

    def __init__(self, names, config):
        self.names = names
        self.config = config

    def on_a(self, *command):
        """A command as it runs on the first host."""
        return ["ip", "netns", "exec", self.names[0], *command]

    def cut(self):
        """Takes the second host off the network."""
        two_hosts.ip("-n", self.names[1], "link", "set", self.names[1], "down")

    def mend(self):
        """Puts it back."""
        two_hosts.ip("-n", self.names[1], "link", "set", self.names[1], "up")


@contextlib.contextmanager
def two_ssh_hosts(folder: pathlib.Path):
    """Yields the hosts; their servers end with the block."""
    folder.mkdir(parents=True)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True, timeout=30)
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and Debian makes it with the service.
    config = folder / "config"
    config.write_text(_USER.format(*two_hosts.ADDRESSES, folder=folder))
    with two_hosts.made() as names, contextlib.ExitStack() as stack:
        for name, address in zip(names, two_hosts.ADDRESSES, strict=True):
            own = folder / f"sshd-{name}.conf"
            own.write_text(_SERVER.format(address=address, folder=folder))
            log = str(folder / f"sshd-{name}.log")
            server = subprocess.Popen(
                ["ip", "netns", "exec", name, _found("sshd"), "-D", "-E", log, "-f", str(own)],
                stdin=subprocess.DEVNULL,
            )
            stack.callback(server.wait)
            stack.callback(server.terminate)
        hosts = Hosts(names, config)
        _until_answering(hosts, folder)
        yield hosts


def _until_answering(hosts, folder):
    deadline = time.monotonic() + limits.patient(20)
    for host in ("a", "b"):
        while subprocess.run(
            hosts.on_a("ssh", "-F", str(hosts.config), host, "true"), capture_output=True, timeout=20
        ).returncode:
            logs = "\n".join(file.read_text() for file in folder.glob("sshd-*.log"))
            assert time.monotonic() < deadline, f"{host} doesn't answer\n{logs}"
            time.sleep(0.1)


class ByHosts(Job):
    """A launch by ssh, from the first host to both."""

    def __init__(self, hosts, folder, flags, command):
        super().__init__(
            folder,
            [f"--ssh_config={hosts.config}", "--on=ssh:a,b", "--env=TF_CPP_MIN_LOG_LEVEL=3", *flags],
            command,
            before=hosts.on_a(),
            environ={
                **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
                "PYTHONPATH": str(ROOT),
            },
        )

    def tasks(self):
        """The processes of tasks, by their names; they are descendants of ssh's servers, not of the launcher."""
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                name = process.environ().get("TOOLKIT_STATUS", "").partition("@")[0]
                if name:
                    found.setdefault(name, process)
        return found

    def close(self):
        """Ends the launcher; agents and ssh's own processes follow."""
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + limits.patient(40)
        while _sessions() and time.monotonic() < deadline:
            time.sleep(0.1)


def _sessions():
    """Whatever has come of connections: all but the two servers themselves."""
    mine = psutil.Process()
    found = [process for server in mine.children() for process in server.children(recursive=True)]
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def launched(*arguments):
    job = ByHosts(*arguments)
    try:
        yield job
    finally:
        job.close()
