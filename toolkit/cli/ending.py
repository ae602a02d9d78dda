"""Exit codes, and the last word on standard error.

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
    """Does something and returns the exit code that it ends with.

    Args:
        action: What to do. An int that it returns is the exit code.
        interrupted: The last word after Ctrl-C, if the action has none.
    """
    try:
        result = action()
        sys.stdout.flush()  # Here, where it can still be answered: at exit Python prints a traceback.
    except (ToolkitError, StoppedBySignal) as error:
        stopped = isinstance(error, (JobStopped, StoppedBySignal))
        if not stopped:
            # Said at once: leaving TensorFlow can take seconds, in which others fail because of this.
            status.report(state="failed", at=time.monotonic())
        # A failure's message has the script's own lines, which are left as they are.
        failed = isinstance(error, TaskFailed)
        _complain(str(error) if failed else redaction.masked(str(error), os.environ), stopped=stopped)
        return error.exit_code
    except KeyboardInterrupt:
        _complain(interrupted, stopped=True)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has enough, as `head` does. Python would try to write the rest once more at exit.
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
    except OSError:  # The terminal is closed. Python would try to write the rest once more at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
