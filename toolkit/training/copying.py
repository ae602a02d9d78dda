"""A copy of a run directory at a URL, made in the background: where machines vanish, another one goes on from it.

The run has a process that copies, `copier`, and tells it when there is something to copy. Only the run's begin waits
for that process, because it may bring a checkpoint from the copy, and for a while its end.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import queue
import re
import select
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from toolkit.errors import RunDirectoryError
from toolkit.support import alone, redaction

_LOG = logging.getLogger(__name__)
_ENDS = 10.0  # Seconds in which the process should end.
_SOON = 1.0  # Seconds of waiting for which no message is needed.
SILENT = ("start", "wake", "finish")  # Orders that the process doesn't answer.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long the copier waits, in seconds.

    Attributes:
        beat: After which it says again that it runs.
        silence: Without a beat for so long, a process has vanished.
        patience: For which the start of a run tries to read the copy where the disk has no checkpoint.
        impatience: As long where it has one.
        look: Between two looks at another's beat, and between two attempts of what a run waits for.
        pause: Between two attempts to copy, at most.
    """

    beat: float = 10.0
    silence: float = 25.0
    patience: float = 60.0
    impatience: float = 10.0
    look: float = 1.0
    pause: float = 60.0


class NullCopy:
    """Replaces the copy of a run that has none, and in a process that isn't the chief."""

    def has_checkpoint(self) -> bool:
        """Returns False: there is no copy."""
        return False

    def begin(self, directory: pathlib.Path, *, recipe: str, resume: bool) -> None:
        """Does nothing: there is no copy."""

    def start(self) -> None:
        """Does nothing: there is no copy."""

    def leave(self) -> None:
        """Does nothing: there is no copy."""

    def wake(self) -> None:
        """Does nothing: there is no copy."""

    def finish(self, seconds: float) -> None:
        """Does nothing: there is no copy."""


class Copy:
    """The copy of a run directory at a URL of fsspec's.

    Args:
        url: Such as "s3://bucket/mine" or "file:///mnt/shared/mine".
        keep: How many complete checkpoints the copy keeps, the newest ones.
        times: How long it waits for what.

    Raises:
        RunDirectoryError: There is no such kind of place, or what reads and writes it isn't installed.
    """

    def __init__(self, url: str | os.PathLike, *, keep: int, times: Times = Times()) -> None:
        self._settings: dict[str, Any] = {"url": os.fspath(url), "keep": keep, "token": uuid.uuid4().hex}
        self._settings["times"] = dataclasses.asdict(times)
        self._begun: dict[str, Any] = {}
        self._copied: Mapping[str, Any] = {}
        self._news = threading.Condition()
        self._wanted = self._done = 0
        self._reason, self._over = "", False
        self._process: subprocess.Popen | None = None
        self._open()

    def has_checkpoint(self) -> bool:
        """Returns whether there is a complete checkpoint.

        Raises:
            RunDirectoryError: The place can't be read.
        """
        return bool(self._ask("has_checkpoint"))

    def begin(self, directory: pathlib.Path, *, recipe: str, resume: bool) -> None:
        """Takes the place for this run, and on resume brings the newest checkpoint to the disk.

        Where the disk has a checkpoint, a place that can't be reached is a warning.

        Args:
            directory: The run directory, which this process has locked.
            recipe: Name of the program whose run it is.
            resume: Whether the run goes on with an earlier one.

        Raises:
            RunDirectoryError: Another run is copied there, or one that would be overwritten, or it can't be reached.
        """
        self._begun = {"directory": str(directory.absolute()), "recipe": recipe, "resume": resume}
        self._ask("begin", **self._begun)

    def start(self) -> None:
        """Begins to copy, in the background."""
        self._order("start")
        self.wake()

    def leave(self) -> None:
        """Leaves the place to others where the run didn't begin."""
        with contextlib.suppress(RunDirectoryError):
            self._ask("leave")
        self._end()

    def wake(self) -> None:
        """Has the other process look for what has changed in the directory. Returns at once."""
        with self._news:
            self._wanted += 1
            self._order("wake", wanted=self._wanted)

    def finish(self, seconds: float) -> None:
        """Waits until the copy is as the directory is, and leaves the place to others. It may be called again.

        Args:
            seconds: The longest that it waits. What isn't copied by then is a warning, and goes on being copied as
                long as this process lives.
        """
        if self._over:
            return
        if self._process is None:  # It had ended as the copy was complete.
            try:
                self._open()
                self._ask("begin", **{**self._begun, "resume": True})
            except RunDirectoryError as error:
                _LOG.warning("%s", error)
                return
            self._order("start")
        self.wake()
        self._order("finish", hurries=True)
        ends = time.monotonic() + seconds
        if not self._gone(min(_SOON, seconds)) and seconds > _SOON:
            _LOG.info("Waiting up to %.0f s for the copy in %s", ends - time.monotonic(), shown(self._settings["url"]))
            self._gone(ends - time.monotonic())
        if self._process is not None:
            self._order("finish", hurries=False)
        if self._done < self._wanted and not self._over:
            why = f" ({self._reason})" if self._reason else ""
            _LOG.warning(
                "The copy in %s isn't complete: %s is newer%s",
                shown(self._settings["url"]),
                self._begun["directory"],
                why,
            )

    def _open(self) -> None:
        """Starts the process."""
        command = alone.command("toolkit.training.copier")
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self._process, self._answers), name="copy", daemon=True).start()
        self._ask("open", **self._settings, copied=self._copied)

    def _order(self, do: str, **facts: Any) -> None:
        channel = None if self._process is None else self._process.stdin
        if channel is None:
            return
        with self._news, contextlib.suppress(OSError, ValueError):  # If it has ended, `_listen` says so.
            # A process that is stopped reads nothing, and training waits for nobody. It looks at all when it goes on.
            if do not in SILENT or select.select([], [channel], [], 0)[1]:
                channel.write(json.dumps({"do": do, **facts}).encode() + b"\n")

    def _ask(self, do: str, **facts: Any) -> Any:
        """Gives an order, and returns its answer."""
        self._order(do, **facts)
        found = self._answers.get()
        if "ended" in found:
            raise RunDirectoryError(
                asked=f"copy_to={shown(self._settings['url'])} is where this run is copied",
                found=f"the process that copies ended with {found['ended']}",
                remedy="See what it wrote, or leave copy_to out",
            )
        if "asked" in found:
            self._end()
            raise RunDirectoryError(**found)
        return found["answer"]

    def _listen(self, process: subprocess.Popen, answers: queue.SimpleQueue) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            facts = json.loads(line)
            with self._news:
                if "text" in facts:
                    _LOG.log(facts["level"], "%s", facts["text"])
                elif "done" in facts:
                    self._done, self._copied, self._reason = facts["done"], facts["copied"], ""
                elif "reason" in facts:
                    self._reason = facts["reason"]
                elif "over" in facts:
                    self._over = True
                else:
                    answers.put(facts)
                self._news.notify_all()
        code = process.wait()
        process.stdout.close()
        with self._news:
            process.stdin.close()
            self._process = None
            if code:
                self._over = True
                _LOG.error(
                    "This run is no longer copied to %s: the process that copies ended with %d",
                    shown(self._settings["url"]),
                    code,
                )
            self._news.notify_all()
        answers.put({"ended": code})

    def _gone(self, seconds: float) -> bool:
        """Waits until the process has ended; returns whether it has."""
        with self._news:
            return self._news.wait_for(lambda: self._process is None, timeout=max(seconds, 0.0))

    def _end(self) -> None:
        """Ends the process: it does when nobody is left to give orders."""
        with self._news:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        self._gone(_ENDS)


def shown(url: str) -> str:
    """Returns a URL without the user and the password in it."""
    return re.sub(r"(?<=://)[^/@]*@", f"{redaction.MASK}@", url)
