"""`toolkit COMMAND`: the table of commands.

A command is a module of this room, or a class in one, with `add_arguments(parser)` and `run(arguments)`, which returns
an exit code or None. Its docstring is its help. It is imported when it is asked for.
"""

import inspect
import io
import os
import pkgutil
import platform
import sys
from collections.abc import Sequence

from toolkit import __version__
from toolkit.cli.parser import Parser, unknown
from toolkit.cli.program import exit_code
from toolkit.errors import RequestError

# By its name: where it is, MODULE:CLASS or MODULE:, and its description in a line. Without the colon, an ImportError
# within the module would be hidden.
_COMMANDS = {
    "devices": ("devices:", "show GPUs, who uses them, and what TensorFlow would call them"),
    "doctor": ("observe:Doctor", "find what keeps TensorFlow from training here, and print the fix"),
    "launch": ("launch:", "start a script in several processes, watch them, end them together"),
    "compare": ("compare:", "compare a script's first steps on several devices with the same on one"),
    "jobs": ("jobs:Jobs", "list the jobs that you have launched, and how they are"),
    "logs": ("jobs:Logs", "show what the tasks of a job have written"),
    "attach": ("jobs:Attach", "watch a job that runs"),
    "stop": ("jobs:Stop", "end a job, with a checkpoint"),
    "stacks": ("jobs:Stacks", "show where the tasks of a running job are, and which waits for which"),
    "plan": ("plan:", "choose which layers of a model to replicate and which to shard"),
    "report": ("observe:Report", "write one HTML page about a run, or several compared"),
    "scaling": ("observe:Scaling", "run a recipe at several sizes; show the speed-up and the bottleneck"),
    "init": ("scripts:Init", "write your own train.py, and a job.sh for Slurm"),
    "recipe": ("scripts:Recipe", "run a recipe that came with the toolkit"),
    "tf-config": ("tf_config:", "generate, check or explain TF_CONFIG"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits.

    Args:
        argv: What follows the program's name; `sys.argv[1:]` unless given.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # Closed by the parent process.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it is open as long as the program runs.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A terminal that can't show a character shows its number.
    sys.exit(exit_code(lambda: _run(arguments), interrupted="Interrupted."))


def _run(arguments: list[str]) -> object:
    if not arguments:
        raise RequestError(asked="`toolkit`", found="the command is missing", remedy="`toolkit --help` lists them all")
    name, *rest = arguments
    if name in ("--help", "-h"):
        print(_help())
        return 0
    if name == "--version":
        from toolkit.support.versions import versions

        installed = ", ".join(f"{name} {version}" for name, version in versions(("keras", "tensorflow")).items())
        print(f"toolkit {__version__}, Python {platform.python_version()}, {installed}")
        return 0
    if name not in _COMMANDS:
        raise unknown("command", name, list(_COMMANDS), lists="toolkit")
    command = pkgutil.resolve_name(f"toolkit.cli.{_COMMANDS[name][0]}")
    optional = getattr(command, "OPTIONAL_VALUES", {})  # A command with --help=PAGE makes its own help.
    parser = Parser(
        prog=f"toolkit {name}",
        description=inspect.getdoc(command),
        optional_values=optional,
        add_help="--help" not in optional,
    )
    command.add_arguments(parser)
    return command.run(_parsed(parser, rest))


def _parsed(parser: Parser, arguments: list[str]) -> object:
    try:
        return parser.parse_args(arguments)
    except SystemExit:  # argparse exits after --help; the output must still be flushed.
        sys.stdout.flush()
        raise


def _help() -> str:
    width = max(map(len, _COMMANDS))
    rows = [f"  {name:{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    head = (
        "usage: toolkit COMMAND ...\n\nTrain Keras models with TensorFlow's distribution strategies.\n\n"
        "Try first:\n\n  toolkit doctor                        what keeps TensorFlow from training here\n"
        "  toolkit launch --workers=2 train.py   your script in two processes\n\nCommands:\n"
    )
    return "\n".join(
        [head, *rows, "", "`toolkit COMMAND --help` says what a command takes, `toolkit --version` what is installed."]
    )
