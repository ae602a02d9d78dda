"""How Sphinx makes the manual: scripts/docs."""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

project = "tf-strategy-toolkit"
author = "The authors of tf-strategy-toolkit"
version = release = re.search(r'__version__ = "([^"]+)"', (HERE.parent / "toolkit/__init__.py").read_text())[1]
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sphinx = False
default_role = "code"


def setup(_app):
    """Writes what is made of the code into the pages, before they are read."""
    sys.path.insert(0, str(HERE))
    import generated

    generated.write()
