"""JSON text as an object, or where it stops being one."""

import collections
import json
import re

from toolkit.cluster.problems import Problem, inside, shown

__all__ = ["read"]

_START = "line 1, column 1"
_QUOTES = "Put names and texts in double quotes; in a shell, put single quotes around the whole"
_SAMPLE = 'Write {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'


class _Object(dict):
    """A JSON object that remembers which keys it was given twice."""

    repeated: tuple[str, ...] = ()


def read(text: str | None) -> tuple[dict | None, list[Problem]]:
    """Reads a JSON object; None, and why, where there is none.

    A repeated key is a problem, and the object is returned all the same, with its last value.
    """
    if text is None or not text.strip():
        return None, [Problem(place=_START, found="there is nothing at all", cure=_SAMPLE)]
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return None, [_syntax(text, error)]
    except (ValueError, RecursionError):
        # A number of thousands of digits, or brackets a thousand deep.
        return None, [Problem(place=_START, found="it is too large to be read", cure=_SAMPLE)]
    if not isinstance(value, dict):
        return None, [Problem(place=_START, found=f"this is {shown(value)}, not an object", cure=_SAMPLE)]
    return value, _repeated(value)


def _object(pairs: list[tuple[str, object]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        found.repeated = tuple(name for name, count in counts.items() if count > 1)
    return found


def _repeated(value: dict) -> list[Problem]:
    problems = []
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:  # Not recursive: the text decides how deep this goes.
        place, each = waiting.pop()
        if isinstance(each, _Object):
            problems += [
                Problem(
                    place=inside(place, name),
                    found="this key is there more than once, and only the last would count",
                    cure="Keep one",
                )
                for name in each.repeated
            ]
            waiting += [(inside(place, name), member) for name, member in reversed(each.items())]
        elif isinstance(each, list):
            waiting += [(f"{place}[{i}]", member) for i, member in enumerate(each) if isinstance(member, (dict, list))]
    return problems


def _syntax(text: str, error: json.JSONDecodeError) -> Problem:
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    said = error.msg[:1].lower() + error.msg[1:]
    # Python 3.13 has a message of its own for this, and points at the comma.
    if (before.endswith(",") and after[:1] in ("}", "]")) or error.msg.startswith("Illegal trailing comma"):
        said, cure = "a comma is followed by nothing", "Remove the comma"
    elif error.msg == "Extra data":
        said, cure = "the object has ended and more follows", "Remove what follows, or put it inside the braces"
    elif not after:
        said, cure = "the text ends too early", "Add what is missing, perhaps closing braces: it may have been cut off"
    elif re.match(r"['\w\u2018\u2019\u201c\u201d]", after) and "Expecting" in error.msg:
        cure = _QUOTES
    else:
        cure = "Correct it there or just before; " + _QUOTES[0].lower() + _QUOTES[1:]
    return Problem(place=f"line {error.lineno}, column {error.colno}", found=f"this is no JSON: {said}", cure=cure)
