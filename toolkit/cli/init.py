"""Write your own train.py that trains under every strategy, and a job.sh for Slurm.

    toolkit init
    toolkit init mine --nodes=4 --gpus_per_node=8 --time=2-00:00:00

train.py runs as it is: data and a small model to be replaced by yours, a strategy that is made of what there is, and a
run that can be killed and resumed.
"""

import argparse
import pathlib
import re

from toolkit.cli.parser import check_least
from toolkit.errors import RequestError
from toolkit.launch import checks

__all__ = ["add_arguments", "run"]

_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_NAMES = ("train.py", "job.sh")
_NOTICE = 120  # In seconds, as in job.sh.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("directory", nargs="?", default=".", metavar="DIRECTORY", help="where they go [this one]")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="of job.sh [2]")
    parser.add_argument("--gpus_per_node", type=int, default=4, metavar="N", help="of job.sh; 0 for none [4]")
    parser.add_argument("--time", default="8:00:00", metavar="TIME", help="of job.sh, as sbatch takes it [8:00:00]")
    parser.add_argument("--force", action="store_true", help="write over what is there")


def run(given: argparse.Namespace) -> None:
    """Writes both files, and says what to do next.

    Raises:
        RequestError: One is there already, can't be written, or a number makes no sense.
    """
    check_least(given, nodes=1, gpus_per_node=0)
    checks.single_lines(time=given.time)
    checks.slurm_time(given.time, notice=_NOTICE)
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
