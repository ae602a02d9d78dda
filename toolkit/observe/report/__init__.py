"""Writes an HTML page about one run, or about several compared.

The page holds everything itself and asks nothing of any network.

reading   a run directory, as far as it is there
timeline  the processes of its tasks
figures   numbers in words
tiles     what somebody looks for first
pictures  charts as SVG that takes its colours from the page
page      the page, from a template
writing   from run directories to a file
"""

from toolkit.observe.report.reading import RunData, read
from toolkit.observe.report.writing import write, write_after

__all__ = ["RunData", "read", "write", "write_after"]
