"""Writes an HTML page about one run, or about several compared.

The page holds everything itself and asks nothing of any network.

reading   a run directory as far as it is there, with the processes of its tasks
pictures  charts as SVG that takes its colours from the page
page      the page: its tiles, sentences and tables, from a template to a file
"""

from toolkit.observe.report.page import write, write_after
from toolkit.observe.report.reading import RunData, read

__all__ = ["RunData", "read", "write", "write_after"]
