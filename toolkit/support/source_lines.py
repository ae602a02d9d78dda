"""Which lines of a script the lines of AutoGraph's generated code are, for stacks of a task that hangs.

TensorFlow runs a function that AutoGraph has converted from another file, which is removed with the process. A
task notes for each such file which lines it stands for; its agent replaces them in the task's stacks. The task itself
can't: it may hang in native code that holds Python's interpreter lock.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from toolkit.support import status

GENERATED = "__autograph_generated_file"  # How AutoGraph's files begin.
_FRAME = re.compile(rf'File "(?P<file>[^"\n]*{GENERATED}[^"\n]*)", line (?P<line>\d+) in (?P<name>.*)')


def file_of(path: str, task: str) -> str:
    """Returns the path of a task's file, beside the socket that tasks report to."""
    return f"{path}.{task}.lines"


def note(source_map: Mapping[Any, Any]) -> None:
    """Notes the lines of a function that AutoGraph has converted in this task.

    Args:
        source_map: AutoGraph's, of places in its own file to places in the script.
    """
    task, _, path = os.environ.get(status.SOCKET, "").partition("@")
    lines = [
        f"{made.filename}\t{made.lineno}\t{origin.loc.filename}\t{origin.loc.lineno}\t{origin.function_name}\n"
        for made, origin in source_map.items()
        if GENERATED in made.filename
    ]
    if path and lines:
        with open(file_of(path, task), "a", encoding="utf-8") as file:
            file.write("".join(lines))


def as_written(stacks: str, file: str) -> str:
    """Returns stacks in which each line of AutoGraph's code is the script's own, as far as it is known.

    Args:
        stacks: As faulthandler writes them.
        file: What the task has noted.
    """
    if GENERATED not in stacks:
        return stacks
    known: dict[str, dict[int, tuple[str, str, str]]] = {}
    try:
        with open(file, encoding="utf-8", errors="replace") as noted:
            for line in noted:
                made, number, origin, of, function = line.rstrip("\n").split("\t")
                known.setdefault(made, {})[int(number)] = origin, of, function
    except (OSError, ValueError):  # Nothing was noted, or the last line isn't written yet.
        pass

    def origin_of(frame: re.Match) -> str:
        lines = known.get(frame["file"], {})
        # A statement of several lines is noted by its first.
        before = [number for number in lines if number <= int(frame["line"])]
        if not before:
            return frame[0]
        origin, of, function = lines[max(before)]
        return f'File "{origin}", line {of} in {function}'

    return _FRAME.sub(origin_of, stacks)
