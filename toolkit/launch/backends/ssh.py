"""Runs jobs on hosts that ssh reaches with the user's configuration; rsync copies the working directory."""

import concurrent.futures
import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from toolkit.errors import JobStopped, LaunchError
from toolkit.launch import record
from toolkit.launch.agent.connection import ConnectedAgent, StartedAgent
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor.agents import Backend, check_addresses

_CONNECT = 10  # Seconds in which a connection must be made.
_TICK = 0.1
_ALIVE = 5  # Seconds between ssh's own keep-alive messages.


class SshBackend(Backend):
    """The hosts of a job by ssh.

    Args:
        spec: What was asked.
        mark: The job's own; a file of that name in the directory shows which hosts share it.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Backend` has them.

    Raises:
        LaunchError: There is no ssh, it can't read its configuration, or the hosts' addresses don't go together.
        ClusterError: A host has a public address.
    """

    def __init__(self, spec: JobSpec, *, mark: str) -> None:
        self.spec = spec
        self._mark = mark
        self.hosts = spec.hosts
        self.python = spec.python or sys.executable
        shown = shlex.quote(self.python).replace("{", "{{").replace("}", "}}")
        self.remedy = f"This command must work without a prompt: ssh {{host}} {shown} -c 'import toolkit'; " + (
            "the directory must exist there, or --copy_to must name one"
        )
        self.directory = spec.copy_to or spec.directory or os.getcwd()
        self.addresses = {host: self._address_of(host) for host in self.hosts}
        check_addresses(self.addresses, open_network=spec.open_network)

    def call(self, host: Host) -> ConnectedAgent:
        """Returns a new agent on this host."""
        path = os.environ.get("PYTHONPATH")
        # All of it is quoted for the shell that sshd starts. The user's values follow as JSON.
        start = ["env", f"PYTHONPATH={path}"] if path else []
        remote = "exec " + shlex.join([*start, self.python, "-m", "toolkit.launch.agent.program"])
        return StartedAgent(
            [*self.command(), "--", host.name, remote],
            directory=self.directory,
            command=list(self.spec.command),
            number=host.tasks,
            mark=self._mark,
            first=host == self.hosts[0],
            silence=self.spec.silence,
            grace=self.spec.grace,
        )

    def copy(self, received: Sequence[int]) -> None:
        """Copies this directory to every host in parallel, if that was asked for; removes nothing there.

        Args:
            received: Signals to this process are appended to it.

        Raises:
            LaunchError: There is no rsync here or there, or it failed.
            JobStopped: A signal has come.
        """
        if self.spec.copy_to is not None:
            with concurrent.futures.ThreadPoolExecutor(max_workers=8) as several:
                list(several.map(lambda host: self._copy(host, received), self.hosts))

    def command(self) -> list[str]:
        """Returns the beginning of a command: ssh with the user's configuration, without questions."""
        own = ["-F", self.spec.ssh_config] if self.spec.ssh_config else []
        options = [f"ConnectTimeout={_CONNECT}", f"ServerAliveInterval={_ALIVE}", "ServerAliveCountMax=3"]
        # ssh -v or a shared master connection may print lines that aren't this job's.
        fixed = ["BatchMode=yes", "ControlPath=none", "RequestTTY=no", "ForwardX11=no", "ClearAllForwardings=yes"]
        return ["ssh", *own, *(word for option in (*fixed, *options) for word in ("-o", option))]

    def _address_of(self, host: Host) -> str:
        """Returns the name or address at which ssh reaches a host, for other hosts to use."""
        try:
            done = _finished(
                [*self.command(), "-G", "--", host.name],
                asked="--on=ssh starts tasks by ssh",
                remedy="Install it: sudo apt-get install openssh-client",
            )
        except subprocess.TimeoutExpired:
            return host.name.rpartition("@")[2]
        if done.returncode:
            raise LaunchError(
                asked=f"ssh is to reach {host.name}",
                found=f"it says: {_errors(done)[-1]}",
                remedy="Correct ssh's configuration",
            )
        found = re.search(r"^hostname (.+)$", done.stdout, re.MULTILINE)
        return found[1] if found else host.name.rpartition("@")[2]

    def _copy(self, host: Host, received: Sequence[int]) -> None:
        # rsync also needs brackets around an IPv6 address.
        name = re.sub(r"^((?:[^@]*@)?)([^@\[]*:[^@]*)$", r"\1[\2]", host.name)
        target = f"{name}:{self.directory.rstrip('/')}/"
        left_out = [f"--exclude={pattern}" for pattern in record.LEFT_OUT]
        # --protect-args: no remote shell reads the names.
        command = ["rsync", "--archive", "--protect-args", "--mkpath", *left_out, "-e", shlex.join(self.command())]
        done = _finished(
            [*command, "--", f"{os.getcwd()}/", target],
            asked="--copy_to copies this directory to the hosts",
            remedy="Install it here and there: sudo apt-get install rsync",
            timeout=None,
            received=received,
        )
        if done.returncode:
            raise LaunchError(
                asked=f"this directory is to be copied to {self.directory} on {host.name}",
                found=f"rsync says: {_errors(done)[0][:300]}",
                remedy="Correct that, or copy the directory yourself and leave --copy_to out",
            )


def _finished(
    command: list[str], *, asked: str, remedy: str, timeout: float | None = _CONNECT, received: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program until it ends or this process gets a signal; the terminal doesn't send it the signal as well."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except FileNotFoundError:
        raise LaunchError(asked=asked, found=f"there is no {command[0]} on this machine", remedy=remedy) from None
    deadline = None if timeout is None else time.monotonic() + timeout
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_TICK)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                if received:
                    raise JobStopped(received[0])
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, timeout or 0)
        finally:
            process.terminate()


def _errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
