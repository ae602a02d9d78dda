"""A script that is only compared: `toolkit compare` runs it, and each of its calls ends after the first step.

This file imports no TensorFlow: a run asks it where to write before anything else is there.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass
class Step:
    """A step that was compared, or couldn't be.

    Attributes:
        call: "fit", "evaluate" or "predict".
        model: The model's name.
        line: The script's line that made the call.
        tensors: How many were compared.
        dtypes: Those of the floating ones.
        first: The first tensor that isn't one device's, in the order of computing, and how far it is apart.
        differs: All variables and logs that aren't, in the same words.
        known: Why that is so, where the reason is a known one; "" otherwise.
        skipped: Why nothing could be compared; "" otherwise.
        seconds: How long it took, beside the script's own step.
        runs: How often one device has made the step.
        rows: How many of a batch's rows were compared, the first ones, where one device can't hold all; 0 for all.
        of_rows: How many rows the batch has then.
    """

    call: str
    model: str
    line: str
    tensors: int = 0
    dtypes: tuple[str, ...] = ()
    first: str = ""
    differs: tuple[str, ...] = ()
    known: str = ""
    skipped: str = ""
    seconds: float = 0.0
    runs: int = 0
    rows: int = 0
    of_rows: int = 0


@dataclasses.dataclass
class Session:
    """What has come of a script that is compared.

    Attributes:
        folder: Returns where its runs write.
        steps: What was compared, in order.
        runs: How many runs have begun.
        ended: In which calls the script was ended, as they went on; "" if it came to its own end.
    """

    folder: Callable[[], pathlib.Path]
    steps: list[Step] = dataclasses.field(default_factory=list)
    runs: int = 0
    ended: str = ""
    _again: tuple[int, int] = (0, 0)  # How much has been called since so many steps were known.

    def again(self, call: str, line: str, *, made: bool) -> None:
        """Counts a call of what was compared before, and ends the script where only such ones follow one another.

        Nobody else can end a script's own loop. What comes behind it, such as a test after an epoch, is waited for.

        Args:
            call: What was called.
            line: The script's line that calls it.
            made: Whether a step is made for it, which takes longer.

        Raises:
            SystemExit: It was called often enough. All processes of a script count alike.
        """
        known, count = self._again
        count = (count if known == len(self.steps) else 0) + (_MADE if made else 1)
        self._again = len(self.steps), count
        if count >= _ENOUGH:
            self.ended = f"{call} ({line})"
            raise SystemExit(0)


_ENOUGH = 1000  # Calls for which no step is made: many epochs have fewer.
_MADE = 20  # As many of these as one for which a step is made.
_session: Session | None = None


def session() -> Session | None:
    """Returns the session of the script that is only compared; None where a script runs as usual."""
    return _session


def run_directory() -> pathlib.Path | None:
    """Returns another directory for each run of a script that is only compared; None where a run writes as usual."""
    if _session is None:
        return None
    _session.runs += 1
    return _session.folder() / f"run-{_session.runs}"


@contextlib.contextmanager
def watched() -> Iterator[Session]:
    """A context in which the first step of each function is compared, and what is found is kept."""
    global _session
    with contextlib.ExitStack() as stack:

        @functools.cache  # Made where a run asks for it: a task that serves a chief never comes back to remove it.
        def folder() -> pathlib.Path:
            return pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolkit-compare-")))

        _session = Session(folder)
        try:
            yield _session
        finally:
            _session = None


_STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


def end_call(model: Any, kind: str) -> None:
    """Has Keras's loop end after this step."""
    setattr(model, _STOPS[kind], True)
