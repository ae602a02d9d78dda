"""Which variables and flags hold what nobody else is to read, and texts without it.

A name says that its value is secret. Values of fewer than 8 letters are left alone: `true` and `1` stand everywhere.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MASK", "is_secret", "masked", "masked_all", "masked_command", "pattern", "values"]

MASK = "***"
_SECRET = re.compile(r"(?i)token|passw(or)?d|passphrase|secret|credential|(api|private|access|account)[_-]?key")
_SHORTEST = 8


def is_secret(name: str) -> bool:
    """Whether a variable or a flag of this name holds a secret."""
    return bool(_SECRET.search(name))


def values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the secrets of an environment, the longest first, also without white space around them."""
    named = [value for name, value in environ.items() if is_secret(name)]
    found = {form for value in named for form in (value, value.strip()) if len(form) >= _SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def pattern(secrets: Sequence[str]) -> re.Pattern[str]:
    """Returns what finds any of them in a text: the longest of those that begin at a place.

    Args:
        secrets: As `values` returns them, at least one.
    """
    return re.compile("|".join(map(re.escape, secrets)))


def masked(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text with *** in the place of each secret of an environment."""
    secrets = values(environ)
    return pattern(secrets).sub(MASK, text) if secrets else text


def masked_all(value: Any, environ: Mapping[str, str]) -> Any:
    """As `masked`, for every text in a value that JSON can hold."""
    secrets = values(environ)
    if not secrets:
        return value
    found = pattern(secrets)

    def inner(each: Any) -> Any:
        if isinstance(each, str):
            return found.sub(MASK, each)
        if isinstance(each, Mapping):
            return {inner(name): inner(member) for name, member in each.items()}
        return [inner(member) for member in each] if isinstance(each, (list, tuple)) else each

    return inner(value)


def masked_command(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns a command line without the values of flags that name a secret, nor those of an environment.

    Args:
        command: Such as ["train.py", "--api_token=abc", "--password", "abc"].
        environ: Whose secrets are masked wherever they stand.
    """
    shown: list[str] = []
    hide = False
    for part in command:
        if hide and not part.startswith("-"):
            shown.append(MASK)
            hide = False
            continue
        name, equals, _ = part.partition("=")
        secret = is_secret(name) and (name.startswith("-") or bool(equals))
        shown.append(f"{name}={MASK}" if secret and equals else masked(part, environ))
        hide = secret and not equals
    return shown
