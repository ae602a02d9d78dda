"""The command line of a `toolkit` command: argparse with this toolkit's error messages."""

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from toolkit.errors import RequestError
from toolkit.support.words import NEEDS, did_you_mean, nearest

_WIDTH = 80


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps indented lines of a description, such as commands, and fills its paragraphs to a terminal's width."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002 - Of the class that is derived from.
        parts = re.split(r"\n\s*\n", text.strip("\n"))
        filled = [
            part if part.startswith(" ") or "\n " in part else textwrap.fill(" ".join(part.split()), _WIDTH - 1)
            for part in parts
        ]
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that takes no abbreviations and raises `RequestError`."""

    def __init__(self, *, optional_values: Mapping[str, str] | None = None, **settings) -> None:
        """Takes what `argparse.ArgumentParser` takes.

        Args:
            optional_values: Flags that may be given without their value, and what that means.
            settings: As `argparse` has them.
        """
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)
        self._optional_values = optional_values or {}

    def parse_known_args(self, args=None, namespace=None):
        """Refuses unknown arguments here, where the known options are at hand for a suggestion."""
        parsed, stray = super().parse_known_args(self._spelled(args), namespace)
        if not stray:
            self._check_values(parsed)
            return parsed, stray
        name = stray[0].partition("=")[0]
        if not name.startswith("-"):
            raise RequestError(
                asked=f"the argument {name!r}",
                found=f"`{self.prog}` takes none there",
                remedy=f"`{self.prog} --help` says what it takes",
            )
        raise unknown("option", name, sorted(self._option_string_actions), lists=self.prog)

    def _spelled(self, args: Sequence[str] | None) -> list[str]:
        """Normalises flags: words may be joined by - or _, and some flags need no value.

        What follows the first argument that is no flag, such as a script, is left alone.
        """
        found = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        for number, argument in enumerate(found):
            name, equals, value = argument.partition("=")
            if not argument.startswith("-") or argument in ("--", "-m"):
                before = known.get(found[number - 1]) if number else None
                if before is None or before.nargs is not None:
                    break
                continue
            other = "--" + name[2:].replace("-", "_")
            name = name if name in known or not name.startswith("--") else other if other in known else name
            missing = not equals and name in self._optional_values
            found[number] = f"{name}={self._optional_values[name]}" if missing else f"{name}{equals}{value}"
        return found

    def _check_values(self, parsed: argparse.Namespace) -> None:
        """Refuses --name=--, which argparse turns into an empty list in some versions of Python."""
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if (
                action.nargs is None
                and isinstance(value, list)
                and ([] in value or (not value and action.default != []))
            ):
                name = (action.option_strings or [action.dest])[-1]
                raise RequestError(
                    asked=f"{name}=--", found="that isn't a value", remedy=f"`{self.prog} --help` says what it takes"
                )

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as one of this toolkit's errors."""
        asked, _, found = message.removeprefix("argument ").partition(": ")
        help_line = f"`{self.prog} --help` says what it takes"
        if match := re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", found):
            raise unknown(asked, match[1], re.findall(r"[\w-]+", match[2]), lists=self.prog)
        if match := re.match(r"invalid (int|float) value: (.*)", found):
            raise RequestError(asked=f"{asked}={match[2]}", found=NEEDS[match[1]], remedy=help_line)
        if message.startswith("the following arguments are required"):
            raise RequestError(asked=f"`{self.prog}`", found=f"{found} is missing", remedy=help_line)
        raise RequestError(asked=asked if found else f"`{self.prog}`", found=found or message, remedy=help_line)


def unknown(kind: str, name: str, names: Sequence[str], *, lists: str) -> RequestError:
    """Returns the error for an unknown name, with a suggestion."""
    # Leading dashes are the same in all names, so they don't count for similarity.
    plain = {each.lstrip("-"): each for each in names}
    meant = name.lstrip("-")
    near = nearest(meant, plain)
    return RequestError(
        asked=f"{kind} {name}",
        found=f"there is no such {kind}",
        remedy=did_you_mean(near and plain[near]) + f"`{lists} --help` lists them all",
    )


def check_least(given: argparse.Namespace, **least: int) -> None:
    """Checks that numbers are large enough; None passes.

    Args:
        given: What was parsed.
        least: The least value of each option, by its name.

    Raises:
        RequestError: One is smaller.
    """
    for name, limit in least.items():
        if (value := getattr(given, name)) is not None and value < limit:
            raise RequestError(
                asked=f"--{name}={value}", found=f"it must be at least {limit}", remedy=f"Give {limit} or more"
            )
