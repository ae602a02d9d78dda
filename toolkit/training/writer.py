"""Who copies to a place: of several processes one at a time, which says again and again that it still runs."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from typing import Any

from toolkit.training.copying import Times
from toolkit.training.place import Place

_LOG = logging.getLogger(__name__)
WRITER = "writer.json"


class TakenOver(Exception):
    """Another process copies to the place now."""


class Writer:
    """This process, as the one that copies to a place.

    Args:
        place: The place.
        token: By which this run's process is known there.
        times: How long it waits.
    """

    def __init__(self, place: Place, *, token: str, times: Times) -> None:
        self._place, self._token, self._times = place, token, times
        self.claimed = False
        self._beating = threading.Lock()
        self._replaced: str | None = None  # The process that was taken for vanished.

    def take(self, *, before: str) -> None:
        """Writes who copies to the place.

        Args:
            before: As whom this directory's last process did. That one has ended, because the directory was unlocked.
        """
        found = self._place.read(WRITER)
        if found is None:
            try:
                self._place.create(WRITER, self._facts())
                self.claimed = True
                return
            except FileExistsError:  # Two runs begin.
                found = self._place.read(WRITER)
        token = facts_of(found).get("token")
        if found is not None and token not in (before, self._token):
            self._wait_for_silence(found)
            self._replaced = token
        self._place.write(WRITER, self._facts())
        self.check()
        self.claimed = True

    def _wait_for_silence(self, found: bytes) -> None:
        """Waits until it is sure that another process no longer copies to the place.

        Raises:
            RunDirectoryError: It does.
        """
        who = _who(found)
        _LOG.info(
            "%s was copying to %s: waiting %.0f s to see whether it still runs",
            who,
            self._place.shown,
            self._times.silence,
        )
        ends = time.monotonic() + self._times.silence
        while time.monotonic() < ends:
            time.sleep(min(self._times.look, self._times.beat / 4))
            now = self._place.read(WRITER)
            if now is None:
                return
            if now != found:
                raise self._place.refused(
                    f"{_who(now)} copies its run there", "Wait for that run to end, or name another place for the copy"
                )

    def check(self) -> None:
        """Checks that nobody else copies there.

        Raises:
            TakenOver: Somebody does.
        """
        found = self._place.read(WRITER)
        token = facts_of(found).get("token", self._token)
        if found and token == self._replaced:
            # It was stopped between a look and a beat, and goes on now. It will see whose the place is.
            self._place.write(WRITER, self._facts())
        elif found and token != self._token:
            raise TakenOver(f"{_who(found)} copies its run there now")

    def beat(self) -> None:
        """Says again and again that this process runs."""
        while True:
            time.sleep(self._times.beat)
            with self._beating, contextlib.suppress(Exception):  # The other thread warns.
                if self.claimed:
                    self.check()
                    self._place.write(WRITER, self._facts())

    def _facts(self) -> bytes:
        facts = {"token": self._token, "host": socket.gethostname(), "process": os.getppid(), "at": time.time()}
        return json.dumps(facts).encode()

    def release(self) -> None:
        """Leaves the place to others."""
        with self._beating:
            if self.claimed:
                self.claimed = False
                self.check()
                self._place.remove(WRITER)


def _who(content: bytes) -> str:
    facts = facts_of(content)
    return f"process {facts.get('process', 'unknown')} on {facts.get('host', 'an unknown host')}"


def facts_of(content: bytes | None) -> dict[str, Any]:
    """Returns what a file of JSON says, or nothing if it isn't one."""
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
