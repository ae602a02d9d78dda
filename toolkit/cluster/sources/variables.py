"""Numbers that a launcher left in the environment."""

from collections.abc import Mapping

from toolkit.errors import ClusterError

__all__ = ["count", "text", "whole"]

_MOST = 100_000


def text(environ: Mapping[str, str], name: str, *, launcher: str) -> str:
    """Returns a variable's value, without white space around it.

    Raises:
        ClusterError: It isn't set, though this launcher sets it.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ClusterError(
            asked=f"{launcher} says who takes part, in {name} among others",
            found=f"{name} is not set",
            remedy=f"Pass {launcher}'s variables on to this process, or set TF_CONFIG instead",
        )
    return value


def whole(environ: Mapping[str, str], name: str, *, launcher: str) -> int:
    """Returns a variable's value as a number from 0 on.

    Raises:
        ClusterError: It isn't set, or isn't such a number.
    """
    value = text(environ, name, launcher=launcher)
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise ClusterError(
            asked=f"{launcher} says who takes part, in {name} among others",
            found=f"{name} is {value[:60]!r}, which is no number",
            remedy="Leave it as the launcher sets it, or set TF_CONFIG instead",
        )
    return int(value)


def count(environ: Mapping[str, str], name: str, *, launcher: str) -> int:
    """Returns a variable's value as a number of tasks.

    Raises:
        ClusterError: It isn't set, or isn't such a number, or says more than 100,000.
    """
    value = whole(environ, name, launcher=launcher)
    if value > _MOST:
        raise ClusterError(
            asked=f"{launcher} says how many take part, in {name}",
            found=f"{value:,} is more than {_MOST:,} tasks",
            remedy="Leave it as the launcher sets it, or set TF_CONFIG instead",
        )
    return value
