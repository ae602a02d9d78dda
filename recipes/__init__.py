"""Runnable examples, one page each: `python -m recipes.NAME --help`."""

import sys

if sys.argv[:1] == ["-m"]:  # The value while Python looks for the module of `python -m recipes.NAME`.
    from toolkit.cli.program import quieten

    quieten()
