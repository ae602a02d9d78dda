"""Recognises secrets among variables and flags, and masks them in texts.

A name says that its value is secret. Values of fewer than 8 letters are left alone: `true` and `1` are everywhere.
So is a number of tokens, such as MAX_TOKENS=4096.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET = re.compile(
    # Tokens of a text are no secrets: --tokenizer, --pad_token, --token_dropout, --tokens_per_batch.
    r"(?i)(?<!(pad|eos|bos|unk|cls|sep)[_-])(?<!mask[_-])"
    r"tokens?(?![a-z]|[_-](per|in|count|len|ids?|dropout|embed|type|limit|level|class|mix))"
    r"|passw(or)?d|passphrase|secret|credential|(api|private|access|account)[_-]?key"
)
_NUMBER = re.compile(r"(?i)[-+]?[\d_.]+(e\d+)?")
_SHORTEST = 8


def is_secret(name: str) -> bool:
    """Returns whether a variable or a flag of this name holds a secret."""
    return bool(_SECRET.search(name))


def _is_secret(name: str, value: str) -> bool:
    return is_secret(name) and not (name.lower().endswith("tokens") and _NUMBER.fullmatch(value))


def values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the secrets of an environment, the longest first, also without white space around them."""
    named = [value for name, value in environ.items() if _is_secret(name, value)]
    found = {form for value in named for form in (value, value.strip()) if len(form) >= _SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def pattern(secrets: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that finds any of them in a text, the longest first.

    Args:
        secrets: What `values` returns, at least one.
    """
    return re.compile("|".join(map(re.escape, secrets)))


def masked(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text with *** in place of each secret of an environment."""
    secrets = values(environ)
    return pattern(secrets).sub(MASK, text) if secrets else text


def masked_all(value: Any, environ: Mapping[str, str]) -> Any:
    """Returns a JSON value with every text in it masked."""
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
    """Returns a command line without the values of flags that name a secret, and without an environment's secrets.

    Args:
        command: Such as ["train.py", "--api_token=abc", "--password", "abc"].
        environ: The environment whose secrets are masked everywhere.
    """
    shown: list[str] = []
    before = ""  # A flag that names a secret and whose value is the next argument.
    for argument in command:
        if before and not argument.startswith("-"):
            shown.append(MASK if _is_secret(before, argument) else masked(argument, environ))
            before = ""
            continue
        name, equals, value = argument.partition("=")
        secret = _is_secret(name, value) and (name.startswith("-") or bool(equals))
        shown.append(f"{name}={MASK}" if secret and equals else masked(argument, environ))
        before = name if secret and not equals else ""
    return shown
