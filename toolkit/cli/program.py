"""A recipe as a program: parsing its flags, and `--help`."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from toolkit.cli import log
from toolkit.cli.ending import exit_code
from toolkit.cli.flags import GROUPS
from toolkit.errors import RequestError
from toolkit.support.words import did_you_mean, nearest

__all__ = ["run"]

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
    log.show()
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
    near = nearest(name, _names())
    return RequestError(
        asked=f"--{name}",
        found="there is no such flag",
        remedy=did_you_mean(near and f"--{near}") + "--help lists them all",
    )


def _own() -> list:
    """Returns the flags that recipes define, without absl's own."""
    found = []
    for module, own in flags.FLAGS.flags_by_module_dict().items():
        if not module.startswith("absl."):
            found += own
    return sorted(found, key=lambda flag: flag.name)


def _names() -> list[str]:
    return [name for flag in _own() for name in ((flag.name, f"no{flag.name}") if flag.boolean else (flag.name,))]


def _help(module: object) -> str:
    """Returns the text of `--help`: the module's docstring, and its flags in groups."""
    flags_left = {flag.name: flag for flag in _own()}
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
