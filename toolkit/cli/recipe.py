"""Run a recipe that came with the toolkit, from any folder.

    toolkit recipe
    toolkit recipe cifar_mirrored --gpus=2
    toolkit recipe cifar_mirrored --help

Without a name it lists them. It is `python -m recipes.cifar_mirrored`, also where your own folder is called
`recipes`.
"""

import argparse
import ast
import pathlib
import runpy
import sys
import textwrap

import toolkit
from toolkit.cli.parser import unknown
from toolkit.errors import RequestError

__all__ = ["add_arguments", "run"]

_COLUMNS = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="such as cifar_mirrored")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="the recipe's own flags")


def run(given: argparse.Namespace) -> None:
    """Runs the recipe as Python runs a script, or lists all recipes.

    Raises:
        RequestError: There is no such recipe, or the toolkit was installed without any.
    """
    files = _files()
    if given.recipe is None:
        width = max(map(len, files)) + 2
        for name, file in files.items():
            print(textwrap.fill(f"{name:{width}}{_title(file)}", _COLUMNS, subsequent_indent=" " * width))
        return
    name = given.recipe.removeprefix("recipes.").removesuffix(".py")
    if name not in files:
        raise unknown("recipe", given.recipe, list(files), lists="toolkit recipe")
    sys.argv = [str(files[name]), *given.flags]
    runpy.run_path(str(files[name]), run_name="__main__")


def _files() -> dict[str, pathlib.Path]:
    folder = pathlib.Path(toolkit.__file__).resolve().parent.parent / "recipes"
    found = {file.stem: file for file in sorted(folder.glob("[a-z]*.py"))}
    if not found:
        raise RequestError(
            asked="a recipe", found=f"there are none in {folder}", remedy="Install the toolkit again, with pip"
        )
    return found


def _title(file: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
