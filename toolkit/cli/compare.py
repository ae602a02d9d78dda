"""Compare a script's first steps on several devices with the same steps on one.

    toolkit compare train.py
    toolkit compare --gpus=4 train.py --epochs=5
    toolkit compare --workers=2 -m recipes.cifar_multi_worker
    toolkit compare --ps=1 --workers=2 train.py

The script runs as it is, but each fit, evaluate and predict ends after its first step. That step is computed once more
as plain Keras computes it on one device, from the same batch, weights, slots, metrics and seeds, and every tensor is
compared. How far they may be apart, the step's own rounding says. Without two GPUs, two CPU devices stand in for them.

Loops of a script's own go on, around train_on_batch or strategy.run. Where a call returns single numbers, those of its
first step stand for the next. A script that makes many more calls, and no new ones, is ended.

A Run writes to a temporary folder. What else the script writes, it writes: a model that it saves was trained for a
step.

Exit codes: 0 the same, 1 not the same, 2 nothing was compared, or the script failed.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from toolkit.cli import launch
from toolkit.cli.parser import check_least
from toolkit.errors import RequestError
from toolkit.strategies.check import watching
from toolkit.strategies.check.watching import Step

_AFTER = 4  # How many of what else differs is named.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("--gpus", type=int, metavar="N", help="replicas in one process [all GPUs, or 2 CPU devices]")
    parser.add_argument("--workers", type=int, metavar="N", help="compare in so many processes, which are launched")
    launch.add_options(parser, "ps", "on")
    parser.add_argument("--float64", action="store_true", help="compute in float64, where rounding hides nothing")
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON; the script's output goes away"
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)  # Where a task of several writes what it has found.
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, as Python's -m"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script, and its arguments")


def run(given: argparse.Namespace) -> int | None:
    """Compares, and says what was found.

    Raises:
        RequestError: No script is named, or there is none of that name; or nothing was compared.
        TaskFailed: A task of several failed.
    """
    check_least(given, gpus=2, ps=0, workers=1 if given.ps else 2)
    command = _command(given)
    if given.workers is not None or given.ps or given.on != "local":
        found = _launched(given, command)
    else:
        with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
            found = _here(given, command)
    if given.result is not None:
        pathlib.Path(given.result).write_text(json.dumps(found), encoding="utf-8")
        return 0
    return _say(found, as_json=given.json)


def _command(given: argparse.Namespace) -> list[str]:
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    command = ["-m", *given.module, *given.script] if given.module is not None else list(script)
    if not command or command == ["-m"]:
        raise RequestError(
            asked="`toolkit compare`",
            found="it needs a script to run",
            remedy="Name one, such as `toolkit compare train.py`",
        )
    if command[0] != "-m" and not pathlib.Path(command[0]).is_file():
        raise RequestError(
            asked=f"`toolkit compare {command[0]}`",
            found=f"there is no file {command[0]}",
            remedy="Name the script; flags of compare come before it",
        )
    return command


def _launched(given: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Compares in several processes, and returns what they have found: they agree, or the chief alone trains.

    Raises:
        RequestError: The job ends before a script does, or what was found isn't here.
    """
    from toolkit.launch import start

    here = given.on == "local"
    flags = [f"--gpus={given.gpus}"] * (given.gpus is not None) + ["--float64"] * given.float64
    # Other machines have this directory, or none in common.
    with tempfile.TemporaryDirectory(prefix="toolkit-compare-", dir=None if here else os.getcwd()) as folder:
        result = pathlib.Path(folder, "result.json")
        words = ("-m", "toolkit", "compare", f"--result={result}", *flags, *command)
        values = {"workers": given.workers, "chief": bool(given.ps), "ps": given.ps, "on": given.on}
        values["log_dir"] = str(pathlib.Path(folder, "logs"))
        with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
            start(launch.job_of(words, values))
        if not result.is_file():
            raise RequestError(
                asked=f"`toolkit compare --on={given.on}`",
                found="no task has written here what it found",
                remedy="Compare from a directory that all machines share, with a --on that waits for the job's end",
            )
        return json.loads(result.read_text(encoding="utf-8"))


def _here(given: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Compares in this process."""
    import keras

    from toolkit import cluster

    if cluster.discover(os.environ) is None:
        _give_devices(given.gpus)
    if given.float64:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
    failed = ""
    with watching.watched() as session:
        try:
            _run_script(command)
        except SystemExit as end:
            failed = "" if end.code in (None, 0) else f"it ended with exit code {end.code}"
        except Exception as error:  # The script's own code may raise anything.
            if not isinstance(error, RequestError):
                traceback.print_exc()
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
    steps = [dataclasses.asdict(each) for each in session.steps]
    return {"steps": steps, "failed": failed, "ended": session.ended}


def _give_devices(gpus: int | None) -> None:
    """Sets up the devices that the script's strategy will find."""
    import tensorflow as tf

    from toolkit.devices.setup import configure_for_script

    there = len(tf.config.list_physical_devices("GPU"))
    wanted = gpus or (there if there > 1 else 2)
    configure_for_script(gpus=wanted, emulate="auto" if there >= wanted else "always")


def _run_script(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path.insert(0, str(pathlib.Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def _say(found: dict[str, Any], *, as_json: bool) -> int:
    """Prints what was found, and returns the exit code."""
    steps = [Step(**each) for each in found["steps"]]
    compared = [each for each in steps if not each.skipped]
    differ = [each for each in compared if each.differs]
    code = 1 if differ else 2 if found["failed"] or not compared else 0
    if as_json:
        print(json.dumps({"same": code == 0, **found}, indent=1))
        return code
    for each in (each for each in steps if each.skipped):
        print(f"{_where(each)} wasn't compared: {each.skipped}.")
    if differ:
        _say_difference(differ[0])
    elif compared:
        print(_same(compared))
    if found["failed"]:
        print(f"The script failed: {found['failed']}.")
    elif found["ended"]:
        print(f"The script's own calls went on, and it was ended in {found['ended']}: all were compared before.")
    elif not steps:
        print("Nothing was compared: the script trained with no strategy of toolkit.strategies.create, or one replica.")
    return code


def _same(steps: Sequence[Step]) -> str:
    from toolkit.strategies.check.first_step import of_first_rows

    calls = ", ".join(dict.fromkeys(each.call for each in steps))
    dtypes = " and ".join(sorted({name for each in steps for name in each.dtypes}))
    several = "steps" if len(steps) > 1 else "step"
    tensors = sum(each.tensors for each in steps)
    fewer = "".join(f" {_where(each)} is compared{of_first_rows(each)}." for each in steps if each.rows)
    return f"The same, but for rounding: {tensors} tensors of {len(steps)} {several} ({calls}), in {dtypes}.{fewer}"


def _where(step: Step) -> str:
    line = "" if step.line == "an unknown place" else f", {step.line}"
    return f"The first step of {step.call} ({step.model}{line})"


def _say_difference(step: Step) -> None:
    from toolkit.strategies.check.first_step import REMEDY, of_first_rows

    print(f"Not the same. {_where(step)} isn't one device's: {step.first}{of_first_rows(step)}.")
    names = ", ".join(each.partition(" differs by")[0] for each in step.differs[:_AFTER])
    print(f"{len(step.differs)} of {step.tensors} tensors differ then, such as {names}.")
    print(f"A known difference: {step.known}." if step.known else f"{REMEDY}.")
