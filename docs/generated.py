"""The parts of the manual that are made of the code: python docs/generated.py writes them into their pages.

Each stands between two comments, `<!-- made of the code: NAME -->` and `<!-- end -->`. tests/docs fails where a page's
part isn't what the code says.
"""

import contextlib
import csv
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
_PART = re.compile(r"(<!-- made of the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMMANDS = (
    *("devices", "doctor", "launch", "compare", "jobs", "logs", "attach", "stop", "stacks"),
    *("plan", "report", "scaling", "init", "recipe", "tf-config"),
)
WINGS = ("strategies", "training", "launch", "devices", "parallel", "data", "models", "observe", "cluster", "errors")


def write():
    """Writes the parts of every page."""
    for page in pages():
        page.write_text(filled(page), encoding="utf-8")


def pages():
    """The pages that have such a part."""
    found = [page for page in sorted(HERE.rglob("*.md")) if "<!-- made of the code: " in page.read_text("utf-8")]
    assert len(found) >= 6
    return found


def filled(page):
    """A page's text as it should be."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]().strip("\n") + "\n" + part[3], page.read_text("utf-8"))


def python():
    """The public names of each wing, with their docstrings."""
    import importlib

    parts = []
    for wing in WINGS:
        module = importlib.import_module(f"toolkit.{wing}")
        names = getattr(module, "__all__", None)
        parts += [f"## toolkit.{wing}", "", (module.__doc__ or "").strip().splitlines()[0], ""]
        if names is None:
            names = [name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_"]
        for name in names:
            value = getattr(module, name)
            if inspect.ismodule(value):
                for inner in value.__all__:
                    parts += entry(f"toolkit.{wing}.{name}.{inner}", getattr(value, inner))
            else:
                parts += entry(f"toolkit.{wing}.{name}", value)
    return "\n".join(parts)


def entry(name, value):
    """A class with its methods, a function, or a constant."""
    parts = [f"### {name}", ""]
    if not callable(value):
        return [*parts, f"`{value!r}`", ""]
    parts += [*signature(name.rpartition(".")[2], value), *markdown(value.__doc__)]
    if isinstance(value, type):
        for own, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if own.startswith("_") or not inspect.getdoc(member) or not (member.__doc__ or "").strip():
                continue
            if isinstance(member, property):
                parts += [f"**{name.rpartition('.')[2]}.{own}**", "", *markdown(member.__doc__)]
            elif inspect.isfunction(function):
                parts += [*signature(f"{name.rpartition('.')[2]}.{own}", function), *markdown(function.__doc__)]
    return parts


def signature(name, value):
    """How it is called, as code."""
    try:
        called = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    given = [str(p) for p in called.parameters.values() if p.name not in {"self", "cls"}]
    marks = [p for p in called.parameters.values() if p.name not in {"self", "cls"}]
    keyword = next((n for n, p in enumerate(marks) if p.kind == p.KEYWORD_ONLY), None)
    if keyword is not None and not any(p.kind == p.VAR_POSITIONAL for p in marks):
        given.insert(keyword, "*")
    line = f"{name}({', '.join(given)})"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in given) + ")"
    return ["```py", line, "```", ""]


def markdown(docstring):
    """A docstring of Google's style, as Markdown."""
    found, section = [], ""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        lines = block.splitlines()
        title = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", lines[0])
        if title:
            section = title[1]
            found += [f"*{section}:*", "", *items(lines[1:], section), ""]
        elif section and block.startswith("    "):
            found[-1:] = [*items(lines, section), ""]
        elif block.startswith("    "):
            code = [*textwrap.dedent(block).splitlines(), "```", ""]
            # A sample with an empty line is one sample.
            found[-2:] = ["", *code] if found[-2:] == ["```", ""] else [*found[-2:], "```py", *code]
        else:
            section = ""
            found += [*lines, ""]
    return found


def items(lines, section):
    """A section of a docstring, as a list, or as a paragraph where it describes one value."""
    each = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", textwrap.dedent("\n".join(lines)))]
    if section in {"Returns", "Yields"}:
        return [" ".join(each)]
    return [re.sub(r"^([*\w]+): ", r"- `\1`: ", item) for item in each]


def commands():
    """The help of each command and recipe."""
    from toolkit.cli import main

    parts = []
    for command in COMMANDS:
        argv = [command, "--help=all"] if command == "launch" else [command, "--help"]
        out = io.StringIO()
        wide = mock.patch.dict(os.environ, COLUMNS="80")
        with wide, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
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
    columns = ("mirrored", "sharded", "run", "xla", "workers", "xla_workers", "in_turn", "rounds", "free")
    served = ("servers in turn", "servers, rounds", "servers, free")
    headings = (
        "",
        "mirrored",
        "mirrored, weights in shards",
        "mirrored, in a `Run`",
        "mirrored, XLA",
        "workers",
        "workers, XLA",
        *served,
    )
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
    """toolkit/strategies/upstream/table.csv, in words."""
    rows = rows_of(HERE.parent / "toolkit" / "strategies" / "upstream" / "table.csv")
    return table(
        ("function", "", "why", "upstream"),
        [[f"`{row['place'].replace(':', '.')}`", row["kind"], row["why"], row["upstream"]] for row in rows],
    )


def template():
    """The script that `toolkit init` writes."""
    return f"```py\n{(HERE.parent / 'toolkit/cli/templates/train.py').read_text('utf-8')}```\n"


PARTS = {part.__name__: part for part in (commands, events, features, python, taken_over, template)}

if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    write()
