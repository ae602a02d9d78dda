"""Lines for a person: without TensorFlow's notes, and once where all workers print alike."""

import collections
import re
import time
from collections.abc import Sequence

__all__ = ["Chatter", "Merger"]

# "I0000 00:00:1795368268.607656    5322 port.cc:153] ...", and "2026-11-22 17:24:28.607: I tensorflow/...] ..."
_NATIVE = re.compile(
    rb"(?:(?P<new>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWEF]) )\S+:\d+\]"
)
_ALONE = (
    b"WARNING: All log messages before ",
    b"To enable the following instructions:",
)
_NO_GPU = re.compile(rb"failed call to cuInit|CUDA_ERROR_NO_DEVICE|no NVIDIA GPU device is present")
_DUMP = b"goo.gle/debugstr"  # What protobuf marks a message with that is written out, over the lines that follow.
_FIELD = re.compile(rb"\w+ \{|\}|\w+: (true|false)|  +(\w+ \{|\}|\w+: .*)")
_TASK = re.compile(rb"/job:\w+/replica:\d+/task:\d+")  # Tasks in a message of the coordination service, a line each.
_STEP = re.compile(rb"(?=.*/(?:step|epoch)\b)")  # Keras's line of an epoch, and the times in it.
_TIMES = re.compile(rb"\b[\d:]+(?:us|ms|s)\b")
_RATE = re.compile(rb"\b\d[\d,.]*(?=[ ]?(?:[A-Za-z]+/s(?:ec(?:ond)?)?|[A-Za-z]+ (?:per|a) second)\b)")
_LATE = 0.5  # Seconds that a line waits for the others'.


class Chatter:
    """TensorFlow's native notes among a task's lines: its C++ logging below error, and what belongs to that."""

    def __init__(self) -> None:
        self._dumps = False  # Whether lines of a message may follow, such as a ps's configuration.
        self._depth = 0

    def without(self, lines: Sequence[bytes]) -> list[bytes]:
        """Returns the lines that are no such notes."""
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


class Merger:
    """Lines that all of several tasks print alike, made one.

    A line waits for half a second until the others have printed it; each task's lines keep their order. Keras's lines
    of an epoch are alike if they differ only in seconds, others if they differ only in rates, such as "1,523 images/s":
    the first task's is shown.

    Args:
        tasks: Their names; with fewer than two nothing waits.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._queues: dict[str, collections.deque[tuple[float, bytes, bytes]]] = {
            task: collections.deque() for task in tasks
        }
        self._held: dict[bytes, collections.Counter[str]] = {}  # For each key that waits, how often each task has it.

    def take(self, task: str, lines: Sequence[bytes]) -> list[tuple[str, bytes]]:
        """Takes a task's lines; returns those that are settled by them, each with its task's name or "all"."""
        if len(self._queues) < 2 or task not in self._queues:
            return [(task, line) for line in lines]
        now = time.monotonic()
        for line in lines:
            key = _RATE.sub(b"", _TIMES.sub(b"", line) if _STEP.match(line) else line)
            self._queues[task].append((now, key, line))
            self._held.setdefault(key, collections.Counter())[task] += 1
        return self._alike()

    def late(self, seconds: float = _LATE) -> list[tuple[str, bytes]]:
        """Returns the lines that have waited for so long."""
        limit = time.monotonic() - seconds
        found = self._alike()
        while heads := sorted((queue[0][0], task) for task, queue in self._queues.items() if queue):
            late = [task for since, task in heads if since <= limit]
            if not late:
                break
            # One that not all have goes first: what is behind it may be what the others wait for.
            every = len(self._queues)
            alone = (task for task in late if len(self._held[self._queues[task][0][1]]) < every)
            task = next(alone, late[0])
            found.append((task, self._pop(task)))
            found += self._alike()
        return found

    def flush(self) -> list[tuple[str, bytes]]:
        """Returns all that wait."""
        return self.late(float("-inf"))

    def _alike(self) -> list[tuple[str, bytes]]:
        """Takes the lines that stand first in all queues, as long as they are the same."""
        found = []
        while self._queues and all(self._queues.values()):
            if len({queue[0][1] for queue in self._queues.values()}) > 1:
                break
            line, *_ = [self._pop(task) for task in self._queues]
            found.append(("all", line))
        return found

    def _pop(self, task: str) -> bytes:
        _, key, line = self._queues[task].popleft()
        self._held[key][task] -= 1
        self._held[key] += collections.Counter()  # Leaves out what is down to none.
        if not self._held[key]:
            del self._held[key]
        return line
