"""Removes TensorFlow's native log lines from the terminal of a recipe started by hand, as `toolkit launch` does.

No variable silences all of them: they are written before TensorFlow's own logging is set up.
"""

import os
import signal
import sys
from typing import NoReturn

from toolkit.support import status

__all__ = ["quieten"]

FLAG = "--native_logs"


def quieten() -> None:
    """Pipes this process's native standard error through a process that removes these lines.

    To be called before TensorFlow is imported. Python's own standard error stays as it is, and what comes last of a
    process that crashes is still shown.
    """
    if status.listened() or FLAG in sys.argv or not hasattr(os, "fork") or sys.stderr is None:
        return
    reading, writing = os.pipe()
    shown = os.dup(2)
    if os.fork() == 0:
        os.close(writing)
        _filter(reading, shown)
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    sys.stderr = open(shown, "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115


def _filter(reading: int, shown: int) -> NoReturn:
    from toolkit.launch.display import Chatter

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    chatter, rest = Chatter(), b""
    try:
        while data := os.read(reading, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            os.write(shown, b"".join(line + b"\n" for line in chatter.without(lines)))
        os.write(shown, b"".join(chatter.without([rest] if rest else [])))
    finally:
        os._exit(0)
