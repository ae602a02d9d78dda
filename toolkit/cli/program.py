"""A recipe, or `toolkit`, as a program: parsed flags and `--help`, the exit code, and what is said at the end.

Exit codes: 0 done; 1 failed; 2 what was asked for can't be done; 130 and 143 interrupted and terminated.
"""

import errno
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags

from toolkit.cli.console import show_log
from toolkit.cli.flags import GROUPS, defined
from toolkit.errors import JobStopped, RequestError, StoppedBySignal, TaskFailed, ToolkitError
from toolkit.support import redaction, status
from toolkit.support.words import NEEDS, did_you_mean, nearest

# The placeholder for a value of a recipe's own flag, by the flag's type.
_PLACEHOLDERS = {"int": "N", "float": "X", "comma separated list of strings": "LIST"}
_LONGEST = 100  # The characters of a flag's name.


def run(main: Callable[[], object], *, argv: Sequence[str] | None = None) -> None:
    """Parses the flags that are defined, calls `main`, and exits.

    Args:
        main: Takes nothing; reads `absl.flags.FLAGS`.
        argv: The command line; `sys.argv` unless given.
    """
    arguments = list(sys.argv if argv is None else argv)
    sys.exit(exit_code(lambda: _program(main, arguments), interrupted="Interrupted before training began."))


def _program(main: Callable[[], object], arguments: list[str]) -> None:
    if any(argument in ("--help", "-help", "-h") for argument in arguments[1:]):
        print(_help(sys.modules[main.__module__]))
        return
    _parse(arguments)
    show_log()
    main()


def _parse(arguments: list[str]) -> None:
    for argument in arguments[1:]:
        name = argument.lstrip("-").partition("=")[0]
        # absl searches for similar names recursively, letter by letter.
        if argument.startswith("-") and len(name) > _LONGEST:
            raise _unknown(name)
    try:
        stray = flags.FLAGS(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unknown(error.flagname) from None
    except UnicodeDecodeError:
        raise RequestError(
            asked="--flagfile names a file of flags",
            found="it is not UTF-8 text",
            remedy="Write a flag on each of its lines, such as --epochs=5",
        ) from None
    except (flags.Error, ValueError) as error:  # absl raises a ValueError for --noresume=1.
        asked, _, found = str(error).strip().rstrip(".").removeprefix("flag ").partition(": ")
        if match := re.match(r"(?:invalid literal for|could not convert string to) (int|float)", found):
            found = NEEDS[match[1]]
        raise RequestError(
            asked=asked, found=found or "it is not valid", remedy="--help lists the flags and their values"
        ) from None
    if stray:
        raise RequestError(
            asked=f"the argument {stray[0]!r}",
            found="only flags are understood here",
            remedy="Write --flag=value; --help lists the flags",
        )


def _unknown(name: str) -> RequestError:
    near = nearest(name, [n for flag in defined() for n in (flag.name, *([f"no{flag.name}"] if flag.boolean else []))])
    return RequestError(
        asked=f"--{name}",
        found="there is no such flag",
        remedy=did_you_mean(near and f"--{near}") + "--help lists them all",
    )


def _help(module: object) -> str:
    """Returns the text of `--help`: the module's docstring, and its flags in groups."""
    flags_left = {flag.name: flag for flag in defined()}
    groups = {}
    for title, names in GROUPS.items():
        groups[title] = [_describe(flags_left.pop(name), names[name]) for name in names if name in flags_left]
    own = [_describe(flag, _PLACEHOLDERS.get(flag.flag_type(), "TEXT")) for flag in flags_left.values()]
    lines = [(getattr(module, "__doc__", None) or "").strip()]
    for title, described in {"This recipe": own, **groups}.items():
        if described:
            lines += ["", f"{title}:", "", *described]
    return "\n".join(lines)


def _describe(flag: Any, placeholder: str) -> str:
    """Returns a flag's lines for `--help`, no wider than a terminal."""
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default in (None, []) or flag.boolean else f" [{flag.default}]"
    choices = getattr(flag.parser, "enum_values", None)
    text = flag.help.removeprefix(f"<{'|'.join(choices)}>: ") if choices else flag.help
    value = "|".join(choices) if choices else "" if flag.boolean else placeholder
    wrapped = textwrap.wrap(text + default, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([f"  {name}={value}" if value else f"  {name}", *wrapped])


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


def quieten() -> None:
    """Pipes this process's native standard error through a process that removes TensorFlow's notes.

    To be called before TensorFlow is imported: no variable silences all of them, because they are written before its
    own logging is set up. Python's own standard error stays as it is, and what comes last of a process that crashes
    is still shown.
    """
    if status.listened() or "--native_logs" in sys.argv or not hasattr(os, "fork") or sys.stderr is None:
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
