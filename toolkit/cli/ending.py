"""Exit codes, and the error message at the end of a program.

0 done; 1 failed; 2 what was asked for can't be done; 130 and 143 interrupted and terminated.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable

from toolkit.errors import JobStopped, StoppedBySignal, TaskFailed, ToolkitError
from toolkit.support import redaction, status

__all__ = ["exit_code"]


def exit_code(action: Callable[[], object], *, interrupted: str) -> int:
    """Calls a function and returns the exit code for its result.

    Args:
        action: What to do. An int that it returns is the exit code.
        interrupted: The last word after Ctrl-C, if the action has none.
    """
    try:
        result = action()
        sys.stdout.flush()  # Flushed here, where an error can be handled: at exit Python would print a traceback.
    except (ToolkitError, StoppedBySignal) as error:
        stopped = isinstance(error, (JobStopped, StoppedBySignal))
        if not stopped:
            # Printed at once: TensorFlow may take seconds to shut down, and other tasks fail meanwhile.
            status.report(state="failed", at=time.monotonic())
        # A failure's message contains the script's own lines, which must not be rewrapped.
        failed = isinstance(error, TaskFailed)
        _complain(str(error) if failed else redaction.masked(str(error), os.environ), stopped=stopped)
        return error.exit_code
    except KeyboardInterrupt:
        _complain(interrupted, stopped=True)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has ended, as `head` does. Python would try again to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _complain(f"the output can't be written: {error.strerror}", stopped=False)
        return 1
    return result if isinstance(result, int) else 0


def _complain(text: str, *, stopped: bool) -> None:
    try:
        sys.stdout.flush()
        print(text if stopped else f"error: {text}", file=sys.stderr, flush=True)
    except OSError:  # The terminal is closed. Python would try again to write the rest at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
