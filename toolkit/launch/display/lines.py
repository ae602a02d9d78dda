"""Filters lines for a person: leaves out TensorFlow's own log lines."""

import re
from collections.abc import Sequence

__all__ = ["Chatter"]

# "I0000 00:00:1795368268.607656    5322 port.cc:153] ...", and "2026-11-22 17:24:28.607: I tensorflow/...] ..."
_NATIVE = re.compile(
    rb"(?:(?P<new>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWEF]) )\S+:\d+\]"
)
_ALONE = (
    b"WARNING: All log messages before ",
    b"To enable the following instructions:",
)
_NO_GPU = re.compile(rb"failed call to cuInit|CUDA_ERROR_NO_DEVICE|no NVIDIA GPU device is present")
_DUMP = b"goo.gle/debugstr"  # Protobuf marks a message printed over several lines with this.
_FIELD = re.compile(rb"\w+ \{|\}|\w+: (true|false)|  +(\w+ \{|\}|\w+: .*)")
# Tasks in a message of the coordination service, one on each line.
_TASK = re.compile(rb"/job:\w+/replica:\d+/task:\d+")


class Chatter:
    """Recognises TensorFlow's native log lines below the level of errors, with their continuation lines."""

    def __init__(self) -> None:
        self._dumps = False  # Whether continuation lines may follow, such as a ps's configuration.
        self._depth = 0

    def without(self, lines: Sequence[bytes]) -> list[bytes]:
        """Returns the lines that aren't such log lines."""
        return [line for line in lines if not self._is_note(line)]

    def _is_note(self, line: bytes) -> bool:
        found = _NATIVE.match(line)
        if found is None:
            if self._dumps and _FIELD.fullmatch(line) and (self._depth or not line.startswith(b" ")):
                self._depth = max(0, self._depth + line.count(b"{") - line.count(b"}"))
                return True
            self._dumps, self._depth = False, 0
            return line.startswith(_ALONE) or bool(_TASK.fullmatch(line))
        self._dumps, self._depth = _DUMP in line, 0
        noteworthy = (found["new"] or found["old"]) in b"EF"
        return bool(_NO_GPU.search(line)) if noteworthy else True
