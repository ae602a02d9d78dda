"""Messages between the launcher and a host's agent: one line of JSON each, to and from ssh.

To the agent:    prepare, start, beat, stop.
From the agent:  ready, lines, rows (which shows that it lives), note, end.
"""

import json
from typing import Any

__all__ = ["BEAT", "Reader", "line"]

BEAT = 1.0  # Seconds between two signs of life.
_LONGEST = 32 << 20  # Bytes; what is longer is no message.


def line(kind: str, **facts: Any) -> bytes:
    """Returns a message.

    Args:
        kind: One of those above.
        facts: Values that JSON can hold.
    """
    return json.dumps({"toolkit": kind, **facts}).encode() + b"\n"


class Reader:
    """Takes bytes as they come, and returns whole messages.

    Attributes:
        strange: The last lines that were none, such as a shell's greeting.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.strange: list[str] = []

    def messages(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the messages that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = b""
        found = []
        for text in lines:
            try:
                message = json.loads(text)
                if not isinstance(message["toolkit"], str):
                    raise TypeError(text)
                found.append(message)
            except (ValueError, KeyError, TypeError, RecursionError):
                self.strange = [*self.strange[-4:], text.decode(errors="replace")[:300]]
        return found
