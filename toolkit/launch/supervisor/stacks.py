"""Where tasks are that make no progress, read from their Python stacks."""

import dataclasses
import pathlib
import re
import sysconfig
from collections.abc import Mapping

__all__ = ["Location", "culprits", "locate"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """Where a task's main thread is.

    Attributes:
        in_tensorflow: It runs or waits inside TensorFlow, as in a collective.
        words: The innermost line that is no library's, such as "train.py, line 31, in on_batch_end".
    """

    in_tensorflow: bool
    words: str


def locate(stacks: str) -> Location | None:
    """Reads what faulthandler wrote, None where that isn't a stack.

    Args:
        stacks: All threads' stacks, the main thread's last, each with its innermost frame first.
    """
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    frames = [match for line in threads[-1].splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return None
    # TensorFlow runs an operation or a function from these files, and returns from there when it is done.
    inside = any("/tensorflow/python/eager/" in frame["file"] for frame in frames[:3])
    own = [
        f for f in frames if not f["file"].startswith((*_LIBRARIES, "<frozen")) and "/toolkit/launch/" not in f["file"]
    ]
    frame = (own or frames)[0]
    return Location(
        in_tensorflow=inside, words=f"{pathlib.Path(frame['file']).name}, line {frame['line']}, in {frame['name']}"
    )


def culprits(locations: Mapping[str, Location | None]) -> str:
    """Returns a sentence that names those whom the others wait for.

    Args:
        locations: Where each running task is; None for one that didn't answer.
    """
    outside = {task: found for task, found in locations.items() if found is None or not found.in_tensorflow}
    if not outside:
        return "All tasks are inside TensorFlow."
    words = "; ".join(f"{t} at {p.words}" if p else f"{t}, which doesn't answer" for t, p in outside.items())
    if len(outside) < len(locations):
        return f"These tasks aren't in the collective that the others wait in: {words}."
    return f"No task is inside TensorFlow: {words}."
