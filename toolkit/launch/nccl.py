"""Asks NCCL itself how its ranks are: the RAS socket that each of its processes has since 2.24.

It is a second witness beside our own and never the only one. NCCL counts operations when they are launched, so a kernel
that is stuck on all ranks looks well to it. The protocol is text, and its wording changes with versions, so what NCCL
says of faults is shown as it is: docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html.
"""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Mapping

from toolkit.support.words import counted

_ADDRESS = "localhost:28028"  # NCCL's default. NCCL_RAS_ADDR sets another.
_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n"  # Each rank gets two seconds to answer.
_FIRST = 1.0  # Seconds for the first words.
_TRIES = 3  # All processes of a host share the port, and one that is stopped doesn't answer.
_LONGEST = 8.0  # Seconds for the whole answer: NCCL gives up after seven.
_PIECE = 1 << 16
_MOST_BYTES = 16 << 20  # Anybody's program may be at the port.
_MOST = 20  # Lines that are shown.


class Question(threading.Thread):
    """Asks the NCCL of this machine's processes, in the background.

    Args:
        environ: The environment of these processes.

    Attributes:
        answer: What NCCL says, once the thread has ended; "" where nobody answers.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(daemon=True, name="toolkit-nccl")
        host, _, port = environ.get("NCCL_RAS_ADDR", _ADDRESS).rpartition(":")
        self._host, self._port = host.strip("[]"), port
        self.answer = ""
        self.start()

    def run(self) -> None:
        """Asks until somebody answers, or nobody listens."""
        for _ in range(_TRIES):
            try:
                self.answer = self._ask().decode(errors="replace")
            except TimeoutError:
                continue
            except (OSError, ValueError):  # Nobody listens, or NCCL_RAS_ADDR is no address.
                pass
            return

    def _ask(self) -> bytes:
        with socket.create_connection((self._host, int(self._port)), timeout=_FIRST) as connection:
            connection.sendall(_QUESTION)
            answer, deadline = connection.recv(_PIECE), time.monotonic() + _LONGEST
            with contextlib.suppress(TimeoutError):
                while time.monotonic() < deadline and len(answer) < _MOST_BYTES:
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    piece = connection.recv(_PIECE)
                    if not piece:
                        return answer
                    answer += piece
        return b""  # Half an answer may lack what matters.


def findings(answer: str, tasks: Mapping[str, int]) -> str:
    """Returns what NCCL says of its ranks, in lines; "" if it is no answer of these tasks' NCCL.

    Args:
        answer: What its RAS socket has sent.
        tasks: The process ids of the tasks that use NCCL.
    """
    # A user's processes share the port, also those of another job on this machine.
    total = re.search(r"^ *\d+ +\d+ +\d+ +(\d+) +\d+ *$", answer, re.MULTILINE)
    if "Job summary" not in answer or (total and int(total[1]) != len(tasks)):
        return ""
    parts = re.split(r"^(?:Errors|Warnings)\n=+\n", answer, flags=re.MULTILINE)[1:]
    lines = [line.rstrip() for part in parts for line in part.splitlines() if line.strip()]
    if not lines:
        # Where NCCL fails, its answer breaks off before the table of communicators.
        well = re.search(r" OK *$", answer, re.MULTILINE)
        return "NCCL reports that all ranks answer, and have launched the same operations." if well else ""
    shown = [re.sub(r"\b[Pp]rocess (\d+)", lambda found: _named(found, tasks), line) for line in lines[:_MOST]]
    if len(lines) > _MOST:
        shown.append(f"... and {counted(len(lines) - _MOST, 'line')} more")
    normal = " (where training goes on, such counts differ for moments)" if "MISMATCH" in answer else ""
    return "\n  ".join([f"NCCL reports{normal}:", *shown])


def _named(found: re.Match, tasks: Mapping[str, int]) -> str:
    """Returns the name of our task beside its process id, which processes of several hosts may share."""
    names = [name for name, pid in tasks.items() if pid == int(found[1])]
    return f"{found[0]} ({names[0]})" if len(names) == 1 else found[0]
