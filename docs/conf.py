"""How Sphinx makes the manual: scripts/docs."""

import contextlib
import csv
import io
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

project = "tf-strategy-toolkit"
author = "The authors of tf-strategy-toolkit"
version = release = re.search(r'__version__ = "([^"]+)"', (HERE.parent / "toolkit/__init__.py").read_text())[1]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["reference/generated"]  # Parts of pages.
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sphinx = False
default_role = "code"
autodoc_inherit_docstrings = False  # Keras writes Markdown.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_use_rtype = False
GENERATED = HERE / "reference" / "generated"
COMMANDS = (
    *("devices", "doctor", "launch", "jobs", "logs", "attach", "stop", "stacks"),
    *("plan", "report", "scaling", "init", "recipe", "tf-config"),
)
WINGS = ("strategies", "training", "launch", "devices", "parallel", "data", "models", "observe", "cluster", "errors")


def setup(app):
    """Writes what is made of the code before pages are read."""
    GENERATED.mkdir(exist_ok=True)
    (GENERATED / "commands.md").write_text(commands(), encoding="utf-8")
    (GENERATED / "features.md").write_text(features(), encoding="utf-8")
    (GENERATED / "taken_over.md").write_text(taken_over(), encoding="utf-8")
    (GENERATED / "events.md").write_text(events(), encoding="utf-8")
    (GENERATED / "python.md").write_text(python(), encoding="utf-8")
    app.connect("autodoc-process-docstring", indented_as_code)


def python():
    """The public names of each wing, for autodoc."""
    import importlib

    parts = ["# Python", "", "`import toolkit` imports nothing else: a wing is imported when it is first named.", ""]
    for wing in WINGS:
        module = importlib.import_module(f"toolkit.{wing}")
        names = getattr(module, "__all__", None)
        summary = (module.__doc__ or "").strip().splitlines()[0]
        parts += [f"## toolkit.{wing}", "", summary, ""]
        if names is None:
            names = [name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_"]
        for name in names:
            kind = type(getattr(module, name)).__name__
            if kind == "module":
                inner = getattr(module, name)
                for each in inner.__all__:
                    parts += directive(f"toolkit.{wing}.{name}.{each}", getattr(inner, each))
            elif name.isupper():
                parts += [f"`toolkit.{wing}.{name}`: `{getattr(module, name)!r}`", ""]
            else:
                parts += directive(f"toolkit.{wing}.{name}", getattr(module, name))
    return "\n".join(parts)


def directive(name, value):
    """An autodoc directive for a class or a function."""
    kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "autodata"
    options = ["   :members:"] if kind == "autoclass" else []
    return ["```{eval-rst}", f".. {kind}:: {name}", *options, "```", ""]


def indented_as_code(_app, _what, _name, _object, _options, lines):
    """Has what a docstring indents, between blank lines, be code: the sources write it without a directive."""
    found, inside, section = [], False, False
    for line in lines:
        blank_before = not found or not found[-1].strip()
        if line.strip() and not line.startswith(" "):
            inside = False
            section = line.startswith((":", ".. ")) or line.rstrip().endswith(":")
        elif line.startswith("    ") and blank_before and not inside and not section:
            found += [".. code-block:: python", ""]
            inside = True
        found.append(line)
    lines[:] = found


def commands():
    """The help of each command and recipe."""
    from toolkit.cli import main

    parts = ["# Commands", "", "`toolkit COMMAND --help` prints the same.", ""]
    for command in COMMANDS:
        argv = [command, "--help=all"] if command == "launch" else [command, "--help"]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main.main(argv)
        parts += [f"## toolkit {command}", "", "```text", out.getvalue().rstrip(), "```", ""]
    parts += ["## Recipes", "", "Every recipe is one page of `recipes/`; `--help` prints the same.", ""]
    for recipe in sorted((HERE.parent / "recipes").glob("[a-z]*.py")):
        command = [sys.executable, "-m", f"recipes.{recipe.stem}", "--help"]
        shown = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout
        parts += [f"### recipes.{recipe.stem}", "", "```text", shown.rstrip(), "```", ""]
    return "\n".join(parts)


def rows_of(path):
    """A file of the repository, as rows."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def table(headings, rows):
    """A table of Markdown."""
    head = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def events():
    """The events of a job that are kept."""
    from toolkit.launch.events import KINDS

    kept = [(f"`{kind}`", held, said) for kind, (where, held, said) in KINDS.items() if "record" in where]
    return table(("event", "holds", "says"), kept)


def features():
    """docs/features.csv, by groups."""
    rows = rows_of(HERE / "features.csv")
    columns = ("mirrored", "run", "xla", "workers", "in_turn", "rounds", "free")
    served = ("servers in turn", "servers, rounds", "servers, free")
    headings = ("", "mirrored", "mirrored, in a `Run`", "mirrored, XLA", "workers", *served)
    parts = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        parts += [
            f"## {group.capitalize()}",
            "",
            table(headings, [[row["feature"], *(row[c] for c in columns)] for row in own]),
        ]
    return "\n".join(parts)


def taken_over():
    """toolkit/support/taken_over.csv, in words."""
    rows = rows_of(HERE.parent / "toolkit" / "support" / "taken_over.csv")
    return table(
        ("function", "", "why", "upstream"),
        [[f"`{row['place'].replace(':', '.')}`", row["kind"], row["why"], row["upstream"]] for row in rows],
    )
