"""The directory that the tasks' logs are in."""

import pathlib
import time
from collections.abc import Sequence

from toolkit.errors import LaunchError
from toolkit.support import umask

__all__ = ["log_directory"]


@umask.guarded()
def log_directory(asked: str | None, names: Sequence[str]) -> pathlib.Path:
    """Makes the directory for logs, and returns it.

    Args:
        asked: A path; None for a new directory under ./runs.
        names: Of the logs in it, without their ends.

    Raises:
        LaunchError: It can't be written.
    """
    try:
        if asked is not None:
            logs = pathlib.Path(asked).expanduser()
            logs.mkdir(parents=True, exist_ok=True)
            for name in names:
                with open(logs / f"{name}.log", "ab"):
                    pass
            return logs
        stem = f"launch-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1000):
            logs = pathlib.Path("runs", f"{stem}-{number}" if number else stem)
            try:
                logs.mkdir(parents=True)
            except FileExistsError:
                if logs.parent.is_dir():
                    continue
                raise
            return logs
        raise FileExistsError(f"{stem} is taken a thousand times")
    except (OSError, ValueError, RuntimeError) as error:  # NUL is a ValueError, ~nobody a RuntimeError.
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise LaunchError(
            asked=f"the tasks' logs are to go to {asked or 'a new directory under ./runs'}",
            found=f"it can't be written ({reason})",
            remedy="Name a directory that can be written with --log_dir",
        ) from error
