"""Finds what keeps TensorFlow from training here, and prints the command that fixes it.

    toolkit doctor
    toolkit doctor --cluster=tf_configs/two_hosts.json
    toolkit doctor --self_test

Exit code 0: no failure was found, with or without warnings; 1: at least one failure.
"""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.observe.doctor import Finding

__all__ = ["add_arguments", "run"]

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("--cluster", metavar="FILE", help="look at the hosts and ports of this cluster too")
    parser.add_argument(
        "--self_test",
        action="store_true",
        help="train ten steps on one device, on all devices, in two processes, and stopped and resumed [1 min]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examines the machine, prints each finding at once, and returns the exit code."""
    from toolkit.observe import doctor

    situation = doctor.Situation.of_this_process(arguments.cluster)
    findings: Iterator[Finding] = doctor.examine(situation)
    if arguments.self_test:
        findings = itertools.chain(findings, doctor.self_test(os.environ))
    seen = []
    for finding in findings:
        seen.append(finding)
        if not arguments.json:
            _show(finding)
    failures, warnings = (sum(each.level == level for each in seen) for level in ("failure", "warning"))
    if arguments.json:
        print(json.dumps({"healthy": not failures, "findings": [dataclasses.asdict(each) for each in seen]}, indent=2))
    elif failures or warnings:
        print(f"{_counted(failures, 'failure')}, {_counted(warnings, 'warning')}.")
    else:
        print("Nothing is wrong.")
    return 1 if failures else 0


def _show(finding: "Finding") -> None:
    import rich
    from rich.table import Table
    from rich.text import Text

    console = rich.get_console()
    level = Text(f"{finding.level:7}", style=_STYLES[finding.level])
    words = Text.assemble((f"{finding.check}: ", "bold"), finding.found)
    if console.is_terminal:
        row = Table.grid(padding=(0, 1))
        row.add_row(level, words)
        console.print(row)
    else:
        console.print(level, words, soft_wrap=True)
    if finding.cure:
        # Not wrapped, so that it can be copied.
        console.print(Text(f"        {finding.cure}", style="cyan"), soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
