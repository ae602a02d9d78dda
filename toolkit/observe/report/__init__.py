"""One page of HTML about a run, or several compared; it asks nothing of any network.

reading   a run directory, as far as it is there
timeline  the processes of its tasks
trying    parts of a page that may fail on their own
pictures  charts as SVG that takes its colours from the page
page      the page, from a template
writing   from run directories to a file
"""

from toolkit.observe.report.reading import RunData, read
from toolkit.observe.report.writing import after, write

__all__ = ["RunData", "after", "read", "write"]
