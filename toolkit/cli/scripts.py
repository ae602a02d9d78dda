"""Scripts to begin with: `toolkit init` writes your own, `toolkit recipe` runs one that came with the toolkit."""

import argparse
import ast
import pathlib
import re
import runpy
import sys
import textwrap

import toolkit
from toolkit.cli.parser import check_least, unknown
from toolkit.errors import RequestError
from toolkit.launch import checks

_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_NAMES = ("train.py", "job.sh")
_NOTICE = 120  # In seconds, as in job.sh.
_COLUMNS = 80


class Init:
    """Write your own train.py that trains under every strategy, and a job.sh for Slurm.

        toolkit init
        toolkit init mine --nodes=4 --gpus_per_node=8 --time=2-00:00:00

    train.py runs as it is: data and a small model to be replaced by yours, a strategy that is made of what there is,
    and a run that can be killed and resumed.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("directory", nargs="?", default=".", metavar="DIRECTORY", help="where they go [this one]")
        parser.add_argument("--nodes", type=int, default=2, metavar="N", help="of job.sh [2]")
        parser.add_argument("--gpus_per_node", type=int, default=4, metavar="N", help="of job.sh; 0 for none [4]")
        parser.add_argument("--time", default="8:00:00", metavar="TIME", help="of job.sh, as sbatch takes it [8:00:00]")
        parser.add_argument("--force", action="store_true", help="write over what is there")

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Writes both files, and says what to do next.

        Raises:
            RequestError: One is there already, can't be written, or a number makes no sense.
        """
        check_least(given, nodes=1, gpus_per_node=0)
        checks.single_lines(time=given.time)
        checks.time_limit(given.time, notice=_NOTICE)
        folder = pathlib.Path(given.directory).expanduser()
        there = [name for name in _NAMES if (folder / name).exists()]
        if there and not given.force:
            raise RequestError(
                asked=f"`toolkit init` is to write {' and '.join(_NAMES)} into {folder.resolve()}",
                found=f"{there[0]} is there already",
                remedy="Name another directory, or write over it with --force",
            )
        texts = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in _NAMES}
        job = re.sub(r"--nodes=\d+", f"--nodes={given.nodes}", texts["job.sh"])
        job = re.sub(r"--time=\S+", f"--time={given.time}", job)
        gpus = f"#SBATCH --gpus-per-node={given.gpus_per_node}\n" if given.gpus_per_node else ""
        texts["job.sh"] = re.sub(r"#SBATCH --gpus-per-node=\d+\n", gpus, job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "job.sh").chmod(0o755)
        except OSError as error:
            raise RequestError(
                asked=f"{folder} is where train.py goes",
                found=f"it can't be written there ({error.strerror})",
                remedy="Name another directory",
            ) from error
        print(f"Written: {folder / 'train.py'} and {folder / 'job.sh'}")
        print("Try it with `python train.py`. Then replace `data` and `build` with your own data and model.")


class Recipe:
    """Run a recipe that came with the toolkit, from any folder.

        toolkit recipe
        toolkit recipe cifar_mirrored --gpus=2
        toolkit recipe cifar_mirrored --help

    Without a name it lists them. It is `python -m recipes.cifar_mirrored`, also where your own folder is called
    `recipes`.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Defines the command line."""
        parser.add_argument("recipe", nargs="?", metavar="NAME", help="such as cifar_mirrored")
        parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="the recipe's own flags")

    @staticmethod
    def run(given: argparse.Namespace) -> None:
        """Runs the recipe as Python runs a script, or lists all recipes.

        Raises:
            RequestError: There is no such recipe, or the toolkit was installed without any.
        """
        files = _files()
        if given.recipe is None:
            width = max(map(len, files)) + 2
            for name, file in files.items():
                title = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
                print(textwrap.fill(f"{name:{width}}{title}", _COLUMNS, subsequent_indent=" " * width))
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
