"""Passwords and tokens, which don't belong on a page."""

import re
from collections.abc import Sequence

__all__ = ["masked"]

_SECRET = re.compile(r"(?i)(token|passw(or)?d|secret|api_?key|credential)")
_MASK = "********"


def masked(command: Sequence[str]) -> list[str]:
    """Returns a command line in which the values of flags that name a secret are masked.

    Args:
        command: Such as ["train.py", "--api_token=abc", "--password", "abc"].
    """
    shown: list[str] = []
    hide = False
    for part in command:
        if hide and not part.startswith("-"):
            shown.append(_MASK)
            hide = False
            continue
        name, equals, _ = part.partition("=")
        secret = bool(_SECRET.search(name)) and (name.startswith("-") or bool(equals))
        shown.append(f"{name}={_MASK}" if secret and equals else part)
        hide = secret and not equals
    return shown
