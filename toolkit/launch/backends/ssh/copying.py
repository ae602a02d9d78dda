"""The working directory, copied to each host by rsync."""

import concurrent.futures
import shlex
import subprocess

from toolkit.errors import LaunchError
from toolkit.launch.backends.ssh.connection import ssh
from toolkit.launch.backends.ssh.hosts import Host
from toolkit.launch.backends.ssh.request import Request

__all__ = ["copy"]

_LEFT_OUT = ("/runs/", ".git/", "__pycache__/", ".venv/", "*.pyc")


def copy(request: Request) -> None:
    """Copies the directory to every host, at once; removes nothing there.

    Raises:
        LaunchError: There is no rsync here or there, or it failed.
    """
    if request.copy_from is None:
        return
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as several:
        for _ in several.map(lambda host: _copy(request, host), request.hosts):
            pass


def _copy(request: Request, host: Host) -> None:
    target = f"{host.name}:{request.directory.rstrip('/')}/"
    left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
    # Names travel as they are (--protect-args): the shell there doesn't read them.
    command = ["rsync", "--archive", "--protect-args", "--mkpath", *left_out, "-e", shlex.join(ssh(request))]
    try:
        done = subprocess.run(
            [*command, "--", f"{request.copy_from}/", target], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            asked="--copy_to copies this directory to the hosts",
            found="there is no rsync on this machine",
            remedy="Install it here and there: sudo apt-get install rsync",
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(
            asked=f"this directory is to be copied to {request.directory} on {host.name}",
            found=f"rsync says: {said[0][:300]}",
            remedy="Mend that, or copy it by other means and leave --copy_to out",
        )
