"""The rules of Slurm and Kubernetes for what a JobSpec asks them for; as in `checks`, each raises a LaunchError."""

import re
from collections.abc import Sequence

from toolkit.launch.job.checks import require

__all__ = ["cores", "sbatch", "slurm_names", "slurm_time"]

_SLURM_NAME = re.compile(r"[\w.+-]+")
# As sbatch --time has it: minutes, h:m:s, days-hours ...
_TIME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9}){0,2}|(:[0-9]{1,9}){1,2})?")
_CORES = re.compile(r"[0-9]+(\.[0-9]+)?m?")
_SBATCH = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(=.*)?")
# Options of sbatch that the launcher sets itself.
_OWN = {"nodes", "ntasks", "ntasks-per-node", "signal", "output", "error", "open-mode", "requeue", "no-requeue", "wrap"}


def cores(text: str, *, whole: bool) -> None:
    """Makes sure that a text is a number of cores.

    Args:
        text: As it was given.
        whole: Whether it must be a whole number, as Slurm's are; Kubernetes takes 1.5 and 500m.
    """
    fits = text.isdecimal() and int(text) > 0 if whole else bool(_CORES.fullmatch(text))
    remedy = "Give a whole number from 1" if whole else "Write it like 4 or 500m"
    require(fits, f"--cpus_per_task={text[:60]}", "that isn't a number of cores", remedy)


def slurm_names(**names: str | None) -> None:
    """Makes sure that these are names as Slurm has them."""
    for flag, name in names.items():
        require(
            name is None or bool(_SLURM_NAME.fullmatch(name)),
            f"--{flag}={name!r}",
            "names have letters, digits, _ . + and -",
            "Write it so",
        )


def sbatch(given: Sequence[str]) -> None:
    """Makes sure that these are options of sbatch without their dashes, and not those that the launcher sets."""
    for text in given:
        found = _SBATCH.fullmatch(text)
        require(
            found is not None, f"--sbatch={text[:60]!r}", "that is no long option of sbatch", "Write --sbatch=qos=long"
        )
        require(
            found is not None and found["name"] != "array",
            f"--sbatch={text[:60]}",
            "each element of an array would be this job once more, in the same directory",
            "Launch once for each element, with its own --log_dir",
        )
        require(
            found is not None and found["name"] not in _OWN,
            f"--sbatch={text[:60]}",
            "the launcher sets that one itself",
            "Use the flag of `toolkit launch --help=slurm` for it",
        )


def slurm_time(text: str, *, notice: int) -> None:
    """Makes sure that a limit is one of Slurm's, and longer than the notice before it."""
    require(
        bool(_TIME.fullmatch(text)),
        f"--time={text!r}",
        "Slurm doesn't accept that as a time",
        "Write minutes, hours:minutes:seconds, or days-hours",
    )
    require(
        notice < _seconds(text),
        f"--time={text} with {notice} s of notice",
        "tasks would get the notice to end as soon as they begin",
        "Give more time or less notice",
    )


def _seconds(time: str) -> int:
    """Returns the seconds of a time as Slurm writes it: minutes, minutes:seconds, h:m:s, days-hours, d-h:m, d-h:m:s."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
