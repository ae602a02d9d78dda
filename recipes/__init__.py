"""Runnable examples, one page each: `python -m recipes.NAME --help`."""
