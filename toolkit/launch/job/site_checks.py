"""Checks what sbatch and kubectl don't check. Their own checks are left to them."""

import re
from collections.abc import Sequence

from toolkit.launch.job.checks import require

__all__ = ["SBATCH", "lines", "sbatch", "slurm_time"]

# Options of sbatch that mean the same for `toolkit launch` (https://slurm.schedmd.com/sbatch.html).
SBATCH = (
    *("qos", "constraint", "gres", "mem", "mem-per-cpu", "mem-per-gpu", "exclude", "nodelist", "reservation"),
    *("mail-user", "mail-type", "licenses", "dependency", "begin", "comment", "nice", "hint", "wckey", "clusters"),
)

# As in sbatch --time: minutes, h:m:s, days-hours ...
_TIME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9}){0,2}|(:[0-9]{1,9}){1,2})?")
# Options of sbatch that the launcher sets itself.
_OWN = {"nodes", "ntasks", "ntasks-per-node", "signal", "output", "error", "open-mode", "requeue", "no-requeue", "wrap"}


def lines(**texts: str | None) -> None:
    """Checks that a directive of a batch script is a single line."""
    for flag, text in texts.items():
        require(
            text is None or text.isprintable(),
            f"--{flag}={text!r:.60}",
            "that isn't a single line of a batch script",
            "Leave line ends and the like out",
        )


def sbatch(given: Sequence[str]) -> None:
    """Checks that the options for sbatch aren't among those that the launcher sets."""
    for text in given:
        lines(sbatch=text)
        name = text.removeprefix("--").partition("=")[0]
        require(
            name != "array",
            f"--sbatch={text[:60]}",
            "each element of an array would be this job once more, in the same directory",
            "Launch once for each element",
        )
        require(
            name not in _OWN,
            f"--sbatch={text[:60]}",
            "the launcher sets that one itself",
            "Use the flag of `toolkit launch --help=slurm` for it",
        )


def slurm_time(text: str, *, notice: int) -> None:
    """Checks that a time limit is one of sbatch's, and longer than the notice before it."""
    if text.upper() in {"UNLIMITED", "INFINITE"}:
        return
    require(
        bool(_TIME.fullmatch(text)),
        f"--time={text}",
        "sbatch takes no such time",
        "Give minutes, such as 480, or hours:minutes:seconds, such as 8:00:00, or days-hours, such as 1-12",
    )
    require(
        notice < _seconds(text),
        f"--time={text} with {notice} s of notice",
        "tasks would get the notice to end as soon as they begin",
        "Give more time or less notice",
    )


def _seconds(time: str) -> int:
    """Returns the seconds of a time in Slurm's format: minutes, minutes:seconds, h:m:s, days-hours, d-h:m, d-h:m:s."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
