"""Finds out from Python stacks where tasks that make no progress are."""

import dataclasses
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence

from toolkit.launch.agent.ports import few
from toolkit.launch.events import WAITS
from toolkit.support.words import counted

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_IN_KERAS = re.compile(r'/backend/tensorflow/trainer\.py", line \d+ in (fit|evaluate)$', re.MULTILINE)
_CALLS_PYTHON = "/tensorflow/python/ops/script_ops.py"  # Functions through which a TensorFlow graph calls Python.
_OURS = re.compile(r"/toolkit/(cli|data|devices|launch|models|observe|parallel|strategies|support|training)/")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """The place of a task's main thread.

    Attributes:
        in_tensorflow: It runs or waits inside TensorFlow, as in a collective.
        words: The innermost line that is no library's, such as "train.py, line 31, in on_batch_end".
        input: Where its input pipeline is, as a line or a file; "" where that isn't to be seen.
    """

    in_tensorflow: bool
    words: str
    input: str = ""


def locate(stacks: str) -> Location | None:
    """Parses faulthandler's output; None if it isn't a stack.

    Args:
        stacks: All threads' stacks, the main thread's last, each with its innermost frame first.
    """
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    frames = [match for line in threads[-1].splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return None
    # TensorFlow runs an operation or a function from these files.
    inside = any("/tensorflow/python/eager/" in frame["file"] for frame in frames[:3])
    waits = re.findall(rf"^{re.escape(WAITS)}(.+)$", stacks, re.MULTILINE)
    return Location(
        in_tensorflow=inside, words=_own_line(frames), input=_in_functions(threads[:-1]) or ", ".join(waits)
    )


def _own_line(frames: Sequence[re.Match]) -> str:
    """Returns the innermost of these frames that is the user's, or else the innermost."""
    frame = ([frame for frame in frames if _is_own(frame["file"])] or frames)[0]
    return f"{pathlib.Path(frame['file']).name}, line {frame['line']}, in {frame['name']}"


def _is_own(file: str) -> bool:
    """Whether a file is the user's: neither a library's nor this toolkit's."""
    return not (file.startswith((*_LIBRARIES, "<frozen")) or _OURS.search(file))


def folded(stacks: str) -> str:
    """Returns stacks in which each run of library frames is replaced by one line.

    Threads without a frame of the user's are left out, but for the main one, the last.
    """
    *others, main = re.split(r"^(?=Current thread |Thread )", stacks, flags=re.MULTILINE)
    shown = []
    for thread in [*others, main]:
        lines, hidden = [], 0
        for line in [*thread.splitlines(), ""]:
            frame = _FRAME.match(line)
            if frame and not _is_own(frame["file"]):
                hidden += 1
                continue
            if hidden:
                lines.append(f"  ... {counted(hidden, 'frame')} of libraries")
                hidden = 0
            lines.append(line)
        if thread is main or any((frame := _FRAME.match(line)) and _is_own(frame["file"]) for line in lines):
            shown.append("\n".join(lines).rstrip())
    return "\n\n".join(shown)


def _in_functions(threads: Iterable[str]) -> str:
    """Returns the places of Python functions that TensorFlow is calling, such as in numpy_function; "" for none."""
    for thread in threads:
        frames = [match for line in thread.splitlines() if (match := _FRAME.match(line))]
        called = [number for number, frame in enumerate(frames) if frame["file"].endswith(_CALLS_PYTHON)]
        if called and called[0] > 0:
            return _own_line(frames[: called[0]])
    return ""


def in_a_collective(stacks: str) -> bool:
    """Returns whether a task waits for others: it is inside TensorFlow, and not in its input."""
    found = locate(stacks)
    return found is not None and found.in_tensorflow and not found.input


def in_training(stacks: str) -> bool:
    """Returns whether a task is in Keras's `fit` or `evaluate`."""
    return bool(_IN_KERAS.search(stacks))


def places(locations: Mapping[str, Location | None]) -> str:
    """Returns a line for each place: which tasks are there.

    Args:
        locations: Where each running task is; None for one that didn't answer.
    """
    tasks: dict[str, list[str]] = {}
    for task, found in locations.items():
        words = "no answer"
        if found is not None:
            words = f"inside TensorFlow, called at {found.words}" if found.in_tensorflow else found.words
            words += f"; its input is at {found.input}" if found.input else ""
        tasks.setdefault(words, []).append(task)
    return "\n".join(f"  {few(names)}: {words}" for words, names in tasks.items())


def culprits(locations: Mapping[str, Location | None]) -> str:
    """Returns a sentence that names the tasks the others wait for.

    Args:
        locations: Where each running task is; None for one that didn't answer.
    """
    outside = {task: found for task, found in locations.items() if found is None or not found.in_tensorflow}
    if not outside:
        reading = [f"{task} is at {found.input}" for task, found in locations.items() if found and found.input]
        inputs = f" The input of {', and of '.join(reading)}." if reading else ""
        return f"All tasks are inside TensorFlow.{inputs}"
    places = {task: found and (found.input or found.words) for task, found in outside.items()}
    if len(outside) < len(locations):
        words = [f"{task}, which {f'is at {where}' if where else 'does not answer'}" for task, where in places.items()]
        return f"The others wait for {', and for '.join(words)}."
    words = [f"{task} at {where}" if where else f"{task}, which does not answer" for task, where in places.items()]
    return f"No task is inside TensorFlow: {'; '.join(words)}."
