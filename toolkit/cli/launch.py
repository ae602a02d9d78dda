"""Start a script in several processes, watch them, and end them together.

    toolkit launch train.py
    toolkit launch --workers=2 -m recipes.cifar_multi_worker --epochs=5
    toolkit launch --on=ssh:a,b:2 train.py
    toolkit launch --on=slurm --nodes=2 --time=60 train.py
    toolkit launch --on=kubernetes --workers=2 --image=IMAGE train.py

Every task gets its TF_CONFIG, its share of GPUs and threads, and a log file; the
chief's lines are shown here, and the first task that fails is named. The flags of
launch come before the script.
"""

import argparse
import array
import fcntl
import os
import re
import stat
import sys
import termios
import textwrap
from typing import Any

from toolkit.cli.console import show_log
from toolkit.launch import JobSpec, dry_run, options, queues, site, start

# Flags that may be given without a value, and the value that they then have.
OPTIONAL_VALUES = {"--help": "first", "-h": "first"}
_PAGES = {
    "first": ("how many tasks", "where", "what is shown", "how they run"),
    "more": ("more",),
    "ssh": ("ssh",),
    **dict.fromkeys(queues.names(), ("queue",)),
    "kubernetes": ("kubernetes",),
}
_WIDTH, _INDENT = 79, 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line: a flag for each attribute of a JobSpec, and the command to start."""
    add_options(parser, *(option.name for option in options()))
    for name in _own():  # By their own names, and by --sbatch=NAME=VALUE or --submit=NAME=VALUE.
        parser.add_argument(f"--{name}", dest=f"submit {name}")
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("-h", "--help", metavar="PAGE")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("script", nargs=argparse.REMAINDER)


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Defines flags for attributes of a JobSpec.

    Args:
        parser: Of launch, or of another command that starts a job.
        names: The attributes'.
    """
    for option in (option for option in options() if option.name in names):
        settings: dict[str, Any] = {"default": option.default, "dest": option.name, "help": option.text}
        if option.kind == "switch":
            settings["action"] = argparse.BooleanOptionalAction if option.default else "store_true"
        elif option.kind == "several":
            settings |= {"action": "append", "default": [], "metavar": option.metavar}
        else:
            settings |= {"type": option.kind, "metavar": option.metavar}
        programs = [queue.submits for queue in queues.every()] if option.name == "submit" else []
        parser.add_argument(*(f"--{name}" for name in (option.name, *programs)), **settings)


# Flags of launch that count wherever they are, unless the script has a flag of the same name.
_MEANT = re.compile(r"--(workers|ps|chief|evaluator|nodes|on|cluster|rendezvous|max_restarts|detach|dry_run)(=|$)")


def run(given: argparse.Namespace) -> None:
    """Launches.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed.
        JobStopped: The launcher received a signal to stop.
    """
    if given.help is not None:
        print(_help(given.help))
        return
    spec = _spec(given)
    if given.dry_run or spec.place == "kubernetes":
        print(dry_run(spec).rstrip("\n"))
        if spec.place == "kubernetes":
            from toolkit.launch.backends import kubernetes

            print("\n".join(kubernetes.notes(spec)), file=sys.stderr)
        return
    show_log()
    if _input_waits():
        print("note: tasks read nothing from standard input; give them a file", file=sys.stderr)
    behind = [word for word in spec.command[1:] if (found := _MEANT.match(word)) and _unsaid(spec, found[1])]
    if behind:
        print(
            f"note: {', '.join(behind)} after the script: the script gets that. For the launcher, write it before the "
            "script",
            file=sys.stderr,
        )
    if message := start(spec, detach=given.detach):
        print(message)


def _unsaid(spec: JobSpec, name: str) -> bool:
    """Returns whether none of these options was given to launch itself."""
    if name in ("workers", "ps", "chief", "evaluator", "nodes", "on", "cluster", "rendezvous"):
        return not (spec.counts or spec.cluster or spec.on != "local" or spec.nodes > 1)
    return name != "max_restarts" or not spec.max_restarts


def _input_waits() -> bool:
    """Returns whether this program's standard input is a pipe or a file."""
    waiting = array.array("i", [0])
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode) and not fcntl.ioctl(0, termios.FIONREAD, waiting) and waiting[0] > 0
    except OSError:
        return False


def _spec(given: argparse.Namespace) -> JobSpec:
    values = {option.name: getattr(given, option.name) for option in options()}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    values["show"] = tuple(name for names in given.show for name in names.split(","))
    values["submit"] += tuple(
        f"{name}={value}" for name in _own() if (value := getattr(given, f"submit {name}")) is not None
    )
    values["env"] = tuple(_variable(text) for text in given.env)
    return job_of(_command(given), values)


def job_of(command: tuple[str, ...], values: dict[str, Any]) -> JobSpec:
    """Returns a job with the defaults of this machine's files.

    Args:
        command: What each task runs.
        values: Attributes of a JobSpec, with `on` among them.

    Raises:
        LaunchError: A value isn't allowed, or a file can't be read.
    """
    return JobSpec(command=command, **site.with_defaults(values, options(), values["on"].partition(":")[0]))


def _command(given: argparse.Namespace) -> tuple[str, ...]:
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    # A -- ends the REMAINDER of -m: argparse would assign the rest of the module's arguments to the next argument,
    # the script.
    return ("-m", *given.module, *given.script) if given.module is not None else tuple(script)


def _own() -> list[str]:
    """Returns the options of queues that are flags by their own names."""
    return list(dict.fromkeys(name for queue in queues.every() for name in queue.own))


def _variable(text: str) -> str:
    """Returns NAME=VALUE; for NAME alone, with its value from this environment."""
    known = "=" not in text and text.isascii() and text in os.environ
    return f"{text}={os.environ[text]}" if known else text


def _help(page: str) -> str:
    pages = list(_PAGES) if page == "all" else [page if page in _PAGES else "first"]
    rows = ["usage: toolkit launch [flags] (SCRIPT | -m MODULE) [arguments]", ""]
    if "first" in pages:
        rows += [(__doc__ or "").partition("\n\nEvery task")[0].strip(), ""]
    for group in dict.fromkeys(group for name in pages for group in _PAGES[name]):
        where = " or ".join(queues.names()) if group == "queue" else group
        of_place = group in ("ssh", "queue", "kubernetes")
        rows.append(f"with --on={where}:" if of_place else f"{group}:")
        for option in options():
            if option.group == group:
                rows += _row(option)
        if group == "where":
            rows += _entry("--detach", "run the job without this terminal; see toolkit jobs")
        if group == "what is shown":
            rows += _entry("--dry_run", "print what would be done; start nothing")
        rows.append("")
    if pages == ["first"]:
        more = ", ".join(f"={name}" for name in [*_PAGES][2:])
        rows.append(f"More pages: --help=more, {more}, =all.")
    return "\n".join(rows).rstrip()


def _row(option: Any) -> list[str]:
    name = f"--[no-]{option.name}" if option.kind == "switch" and option.default else f"--{option.name}"
    value = f"[={option.metavar}]" if f"--{option.name}" in OPTIONAL_VALUES else f"={option.metavar}"
    return _entry(name + ("" if option.kind == "switch" else value), option.text)


def _entry(flag: str, text: str) -> list[str]:
    head = f"  {flag:<{_INDENT - 2}}"
    body = textwrap.wrap(text, _WIDTH - _INDENT)
    first = [head + body[0]] if len(flag) < _INDENT - 2 else [f"  {flag}", " " * _INDENT + body[0]]
    return [*first, *(" " * _INDENT + line for line in body[1:])]
