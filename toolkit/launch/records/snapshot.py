"""Copies a script's files, for a job that waits in a queue or restarts later."""

import os
import pathlib
import shutil

from toolkit.errors import LaunchError

__all__ = ["LEFT_OUT", "take"]

LEFT_OUT = ("/runs/", ".git/", "__pycache__/", ".venv/", "*.pyc")  # Excluded from a copy, as patterns of rsync.
_MOST = 256 << 20  # The most bytes of a copy.


def take(command: tuple[str, ...], target: pathlib.Path) -> tuple[str, ...]:
    """Copies the folder from which a command imports modules, and returns the command that runs the copy.

    The working directory stays: what a script reads and writes is where it was.

    Args:
        command: A script, or -m MODULE, with its arguments.
        target: The copy; it isn't there yet.

    Raises:
        LaunchError: There is too much of it, or it can't be copied.
    """
    module = command[0] == "-m"
    source = pathlib.Path.cwd() if module else pathlib.Path(command[0]).resolve().parent
    left_out = [name.strip("/") for name in LEFT_OUT]
    try:
        found = _too_much(source, left_out)
        if not found:
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    except (OSError, shutil.Error) as error:
        found = f"it can't be copied ({error})"
    if found:
        raise LaunchError(
            asked=f"--snapshot copies {source}", found=found, remedy="Keep data and results out of the script's folder"
        )
    return command if module else (str((target / pathlib.Path(command[0]).name).absolute()), *command[1:])


def _too_much(source: pathlib.Path, left_out: list[str]) -> str:
    """Returns why a folder is too large to be copied; "" if it isn't."""
    size = 0
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in left_out]
        size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
        if size > _MOST:
            return f"that holds more than {_MOST >> 20} MiB"
    return ""
