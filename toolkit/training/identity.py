"""run.json: the script of a directory's run, its fixed configuration, and the logs of each launch."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import RunDirectoryError
from toolkit.support import files, status

__all__ = ["read", "write"]


def read(path: pathlib.Path, *, needed: bool) -> dict[str, Any] | None:
    """Returns "recipe", "config" and "launches" of a run.json; None if there is none.

    Args:
        path: The file.
        needed: Whether there must be one, because there are checkpoints beside it.

    Raises:
        RunDirectoryError: It can't be read, or is missing and needed.
    """
    try:
        found = json.loads(files.read_text(path))
        made = {"recipe": str(found["recipe"]), "config": dict(found["config"])}
        return {**made, "launches": [each for each in found.get("launches", []) if isinstance(each, str)]}
    except FileNotFoundError:
        if not needed:
            return None
        reason = "it is missing"
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "it can't be read"
    raise RunDirectoryError(
        asked=f"{path.parent} is where this run writes",
        found=f"run.json doesn't name the script that wrote its checkpoints: {reason}",
        remedy="Name another directory",
    )


def write(path: pathlib.Path, *, recipe: str, config: Mapping[str, Any], launches: Sequence[str]) -> None:
    """Writes a run.json, with this launch's logs after those of earlier ones; raises an OSError if it can't."""
    logs = status.logs()
    every = [*launches, *([logs] if logs is not None and logs not in launches else [])]
    files.write_json(path, {"recipe": recipe, "config": config, "launches": every})
