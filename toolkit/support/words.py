"""Numbers of things in words, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable

# How a value that is no number is refused, by what it should be.
NEEDS = {"int": "it needs a whole number", "float": "it needs a number"}


def counted(number: int, noun: str) -> str:
    """Returns a number with a noun, such as "1 task" or "2,000 tasks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar, or that begins with this word, or None."""
    names = list(known)
    near = difflib.get_close_matches(name[:80], names, n=1, cutoff=0.7)
    return near[0] if near else next((each for each in names if each.startswith(f"{name}_")), None)


def did_you_mean(name: str | None) -> str:
    """Returns "Did you mean NAME? " to put before a remedy; "" for None."""
    return f"Did you mean {name}? " if name else ""
