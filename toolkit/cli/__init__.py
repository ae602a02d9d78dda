"""Flags and exit codes: what turns the parts into programs.

log       the toolkit's messages on the console
flags     the flags that every recipe shares
program   parsing a command line, `--help`, and exit codes
"""

from toolkit.cli import flags
from toolkit.cli.log import show_devices
from toolkit.cli.program import run

__all__ = ["flags", "run", "show_devices"]
