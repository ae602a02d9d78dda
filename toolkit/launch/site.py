"""Reads the options of a site or a project from files: toolkit.toml.

    [launch]                        # At every place.
    max_restarts = 2
    [slurm]                         # With --on=slurm. Tables for other places work in the same way.
    partition = "gpu"
    setup = ["module load cuda"]

It is looked for in the working directory, and then in ~/.config/toolkit ($XDG_CONFIG_HOME, where that is set). What the
nearer file says goes before the other's, and what is asked for on the command line or in Python before both; of what
may be repeated, all of it counts, but for what has the same name. What means nothing at a place is left out there.
Under a queue's name options of the program that submits may stand by their own names, such as mem = "64G".
"""

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.errors import LaunchError
from toolkit.launch import queues
from toolkit.launch.spec import PLACES, QUEUES, Option
from toolkit.support.words import did_you_mean, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = "toolkit.toml"


def with_defaults(given: Mapping[str, Any], options: tuple[Option, ...], place: str) -> dict[str, Any]:
    """Returns the given options, with defaults from the files.

    Args:
        given: By the names of options; what equals an option's default counts as not given.
        options: All there are.
        place: Where the job is to run, one of PLACES.

    Raises:
        LaunchError: A file can't be read, or names no option.
    """
    known = {option.name: option for option in options if option.name != "on"}
    made = dict(given)
    for queue in queues.every():
        if queue.submits in made:
            made["submit"] = made.pop(queue.submits)
    for path in _files():
        for table, values in _read(path).items():
            if not isinstance(values, Mapping):
                raise _wrong(path, f"{table} outside of a table", "Put it under [launch], or under a place's name")
            if table not in ("launch", *PLACES):
                raise _wrong(path, f"[{table}]", f"Name a table launch, {', '.join(PLACES)}")
            for name, value in values.items():
                if table in QUEUES and name not in known:
                    name, value = _of_queue(queues.find(table), name, value)  # noqa: PLW2901
                if name not in known:
                    meant = did_you_mean(nearest(name, known))
                    raise _wrong(path, f"{name} in [{table}]", f"{meant}`toolkit launch --help=all` lists them all")
                option = known[name]
                typed = _typed(path, option, value)
                if table not in ("launch", place) or place not in option.places:
                    continue
                if option.kind == "several":
                    given_too = option.typed(made.get(name, ()))
                    named = {each.partition("=")[0] for each in given_too if "=" in each}
                    kept = [each for each in typed if "=" not in each or each.partition("=")[0] not in named]
                    made[name] = (*kept, *given_too)
                elif made.get(name, option.default) == option.default:
                    made[name] = typed
    return made


def _of_queue(queue: queues.Queue, name: str, value: Any) -> tuple[str, Any]:
    """Returns an option of the program that submits as one of a job; any other as it is."""
    own = name.replace("_", "-")
    return ("submit", [f"{own}={value}"]) if own in queue.own else ("submit" if name == queue.submits else name, value)


def _files() -> list[pathlib.Path]:
    home = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config")
    return [path for path in (pathlib.Path(_NAME), home / "toolkit" / _NAME) if path.is_file()]


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(
            asked=f"{path} has options for every job here",
            found=f"it can't be read ({getattr(error, 'strerror', None) or error})",
            remedy='Write tables such as [slurm] with lines such as partition = "gpu"',
        ) from error


def _typed(path: pathlib.Path, option: Option, value: Any) -> Any:
    """Converts a value of a file to an option's type; a single text stands for a list of one."""
    try:
        return option.typed([value] if option.kind == "several" and isinstance(value, str) else value)
    except LaunchError as error:
        raise LaunchError(asked=f"{path} has {error.asked}", found=error.found, remedy=error.remedy) from None


def _wrong(path: pathlib.Path, what: str, remedy: str) -> LaunchError:
    return LaunchError(asked=f"{path} has {what}", found="there is no such thing", remedy=remedy)
