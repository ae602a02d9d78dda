"""Secrets of the environment, taken out of a stream of bytes that comes in pieces."""

import os
import re
from collections.abc import Sequence

from toolkit.support.redaction import MASK

__all__ = ["Masker"]


class Masker:
    """Puts *** in the place of each secret, wherever the stream is cut.

    Only an end of the stream that can be the beginning of a secret is held back.

    Args:
        secrets: As `toolkit.support.redaction.values` returns them: the longest first. () lets everything through.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = [os.fsencode(secret) for secret in secrets]
        self._firsts = {secret[0] for secret in self._secrets}
        self._longest = max(map(len, self._secrets), default=0)
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets)))
        self._held = b""

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Takes the next piece; returns what of the stream is settled by it."""
        if not self._secrets:
            return data
        data = self._held + data
        done, position = [], 0
        end = self._beginning(data, position)
        if any(secret in data for secret in self._secrets):  # Much faster than the pattern, and mostly false.
            # What begins before a beginning that may go on can't become another, longer one.
            while (match := self._pattern.search(data, position)) and match.start() < end:
                done += [data[position : match.start()], MASK.encode()]
                position = match.end()
                end = self._beginning(data, position)
        done.append(data[position:end])
        self._held = data[end:]
        return b"".join(done)

    def flush(self) -> bytes:
        """Returns what is held back: the stream has ended, or nothing has come for a while."""
        held, self._held = self._held, b""
        return self._pattern.sub(MASK.encode(), held) if held else b""

    def _beginning(self, data: bytes, position: int) -> int:
        """Returns the first place, from a position on, from which the data may be the beginning of a secret."""
        for start in range(max(position, len(data) - self._longest + 1), len(data)):
            rest = len(data) - start
            if data[start] in self._firsts and any(
                len(secret) > rest and secret.startswith(data[start:]) for secret in self._secrets
            ):
                return start
        return len(data)
