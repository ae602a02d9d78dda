"""The programs that reach a host: ssh as the user has configured it, and rsync, which copies the working directory."""

import concurrent.futures
import re
import shlex
import subprocess

from toolkit.errors import LaunchError
from toolkit.launch.backends.ssh.spec import Host, SshSpec

__all__ = ["address_of", "copy", "ssh"]

_CONNECT = 10  # Seconds for a connection to be made.
_ALIVE = 5  # Seconds between ssh's own signs of life.
_LEFT_OUT = ("/runs/", ".git/", "__pycache__/", ".venv/", "*.pyc")


def ssh(spec: SshSpec) -> list[str]:
    """Returns the beginning of a command: the user's ssh with its configuration, which asks no question."""
    own = ["-F", spec.ssh_config] if spec.ssh_config else []
    options = [f"ConnectTimeout={_CONNECT}", f"ServerAliveInterval={_ALIVE}", "ServerAliveCountMax=3"]
    # A line of ssh -v or a master connection of somebody else's isn't this job's to end.
    every = ["BatchMode=yes", "ControlPath=none", "RequestTTY=no", "ForwardX11=no", "ClearAllForwardings=yes", *options]
    return ["ssh", *own, *(word for option in every for word in ("-o", option))]


def address_of(spec: SshSpec, host: Host) -> str:
    """Returns the name or address at which ssh reaches a host, by its configuration: other hosts are to use it, too.

    Raises:
        LaunchError: There is no ssh, or it can't read its configuration.
    """
    command = [*ssh(spec), "-G", "--", host.name]
    try:
        done = _finished(
            command, asked="--hosts starts tasks by ssh", remedy="Install it: sudo apt-get install openssh-client"
        )
    except subprocess.TimeoutExpired:
        return host.name.rpartition("@")[2]
    if done.returncode:
        raise LaunchError(
            asked=f"ssh is to reach {host.name}",
            found=f"it says: {_errors(done)[-1]}",
            remedy="Mend ssh's configuration",
        )
    found = re.search(r"^hostname (.+)$", done.stdout, re.MULTILINE)
    return found[1] if found else host.name.rpartition("@")[2]


def copy(spec: SshSpec) -> None:
    """Copies the directory to every host, all at once; removes nothing there.

    Raises:
        LaunchError: There is no rsync here or there, or it failed.
    """
    if spec.copy_from is None:
        return
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as several:
        list(several.map(lambda host: _copy(spec, host), spec.hosts))


def _copy(spec: SshSpec, host: Host) -> None:
    target = f"{host.name}:{spec.directory.rstrip('/')}/"
    left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
    # --protect-args: no shell there reads the names.
    command = ["rsync", "--archive", "--protect-args", "--mkpath", *left_out, "-e", shlex.join(ssh(spec))]
    done = _finished(
        [*command, "--", f"{spec.copy_from}/", target],
        asked="--copy_to copies this directory to the hosts",
        remedy="Install it here and there: sudo apt-get install rsync",
        timeout=None,
    )
    if done.returncode:
        raise LaunchError(
            asked=f"this directory is to be copied to {spec.directory} on {host.name}",
            found=f"rsync says: {_errors(done)[0][:300]}",
            remedy="Mend that, or copy it by other means and leave --copy_to out",
        )


def _finished(
    command: list[str], *, asked: str, remedy: str, timeout: float | None = _CONNECT
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise LaunchError(asked=asked, found=f"there is no {command[0]} on this machine", remedy=remedy) from None


def _errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
