"""The working directory, copied to each host by rsync."""

import concurrent.futures
import shlex
import subprocess

from toolkit.errors import LaunchError
from toolkit.launch.backends.ssh.connection import ssh
from toolkit.launch.backends.ssh.spec import Host, SshSpec

__all__ = ["copy"]

_LEFT_OUT = ("/runs/", ".git/", "__pycache__/", ".venv/", "*.pyc")


def copy(spec: SshSpec) -> None:
    """Copies the directory to every host, at once; removes nothing there.

    Raises:
        LaunchError: There is no rsync here or there, or it failed.
    """
    if spec.copy_from is None:
        return
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as several:
        for _ in several.map(lambda host: _copy(spec, host), spec.hosts):
            pass


def _copy(spec: SshSpec, host: Host) -> None:
    target = f"{host.name}:{spec.directory.rstrip('/')}/"
    left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
    # --protect-args: no shell there reads the names.
    command = ["rsync", "--archive", "--protect-args", "--mkpath", *left_out, "-e", shlex.join(ssh(spec))]
    try:
        done = subprocess.run(
            [*command, "--", f"{spec.copy_from}/", target], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            asked="--copy_to copies this directory to the hosts",
            found="there is no rsync on this machine",
            remedy="Install it here and there: sudo apt-get install rsync",
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(
            asked=f"this directory is to be copied to {spec.directory} on {host.name}",
            found=f"rsync says: {lines[0][:300]}",
            remedy="Mend that, or copy it by other means and leave --copy_to out",
        )
