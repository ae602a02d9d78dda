"""What a check found."""

import dataclasses
from typing import Literal

__all__ = ["Finding", "failure", "ok", "warning"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What, in a word or two: "protobuf", "KERAS_BACKEND".
        level: "ok"; "warning" where training works, but not as one may think; "failure" where it can't.
        found: What was found, as a sentence without its full stop.
        cure: The command or step that mends it; "" where nothing is to be mended.
    """

    check: str
    level: Literal["ok", "warning", "failure"]
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Finding:
    """Returns a finding that needs no cure."""
    return Finding(check=check, level="ok", found=found)


def warning(check: str, found: str, cure: str) -> Finding:
    """Returns a finding that training survives."""
    return Finding(check=check, level="warning", found=found, cure=cure)


def failure(check: str, found: str, cure: str) -> Finding:
    """Returns a finding that training doesn't survive."""
    return Finding(check=check, level="failure", found=found, cure=cure)
