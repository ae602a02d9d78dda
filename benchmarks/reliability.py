"""The fault tests, several times over, and a table of their figures in docs/reliability.md.

    python -m benchmarks.reliability --runs=3

Each run takes about 16 minutes on two cores. Only what stands between the file's two markers is
written; its prose is kept. --junit adds files that earlier runs of `pytest -m fault --junitxml=FILE` wrote.
Exit code 1 where a test failed.
"""

import collections
import dataclasses
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from xml.etree import ElementTree

from absl import flags

import toolkit

_RUNS = flags.DEFINE_integer("runs", 3, "How often the tests run.", lower_bound=0)
_JUNIT = flags.DEFINE_multi_string("junit", [], "Files of earlier runs, counted too; may be repeated.")
_OUT = flags.DEFINE_string("out", None, "Which file's table is written. Default: docs/reliability.md here.")
_SELECT = flags.DEFINE_string("select", "", "As pytest's -k.")

ROOT = pathlib.Path(__file__).parent.parent
BEGIN, END = "<!-- Written by benchmarks/reliability.py: -->", "<!-- End of what it writes. -->"
COLUMNS = {
    "seconds_to_notice": "noticed",
    "seconds_to_group_down": "all tasks down",
    "seconds_to_steps_again": "steps again",
    "seconds_to_take_in": "host joined again",
    "seconds_to_end_after_training": "end after training",
}
_VERSIONS = ("tensorflow", "keras", "numpy")


@dataclasses.dataclass
class Row:
    """One fault over all runs.

    Attributes:
        runs: How often it was tried.
        failures: How often its test failed.
        skipped: Why it was, "" where it wasn't.
        figures: Seconds, by column.
    """

    runs: int = 0
    failures: int = 0
    skipped: str = ""
    figures: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))


def run_once(file: pathlib.Path) -> None:
    """Runs the tests, which write a file of figures."""
    select = ["-k", _SELECT.value] if _SELECT.value else []
    command = [sys.executable, "-m", "pytest", "-m", "fault", "tests/faults", f"--junitxml={file}", *select]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(command, cwd=ROOT, env=environ, check=False)


def read(file: pathlib.Path, rows: dict[str, Row]) -> None:
    """Adds what a file of figures says."""
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        if not case.get("classname", "").startswith("tests.faults."):
            continue
        own = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        row = rows.setdefault(own.get("row", case.get("name", "")), Row())
        row.runs += 1
        row.failures += any(case.find(kind) is not None for kind in ("failure", "error"))
        skipped = case.find("skipped")
        if skipped is not None:
            row.skipped = skipped.get("message", "") or "skipped"
        for name in COLUMNS:
            if name in own and own[name] != "nan":
                row.figures[name].append(float(own[name]))


def table(rows: dict[str, Row]) -> list[str]:
    """Returns the lines of a table: for each fault the median, and the worst in brackets."""
    lines = [
        "| fault | " + " | ".join(COLUMNS.values()) + " | runs | failed |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]
    for name, row in rows.items():
        cells = [
            f"{statistics.median(row.figures[column]):.1f} ({max(row.figures[column]):.1f})"
            if row.figures[column]
            else ""
            for column in COLUMNS
        ]
        note = f" ({row.skipped})" if row.skipped else ""
        lines.append(f"| {name}{note} | " + " | ".join(cells) + f" | {row.runs} | {row.failures} |")
    return lines


def machine() -> str:
    """Returns a sentence about where this was measured."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _VERSIONS)
    cores = len(os.sched_getaffinity(0))
    loads = os.getloadavg()
    return (
        f"Measured {time.strftime('%Y-%m-%d')} on {cores} cores ({platform.machine()}, Linux {platform.release()}, "
        f"load {loads[2]:.1f} in the last quarter of an hour), Python {platform.python_version()}, {versions}."
    )


def main() -> None:
    """Runs, reads, writes."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(name) for name in _JUNIT.value]
        for number in range(_RUNS.value):
            files.append(pathlib.Path(folder, f"{number}.xml"))
            run_once(files[-1])
        for file in files:
            read(file, rows)
    out = pathlib.Path(_OUT.value) if _OUT.value else ROOT / "docs" / "reliability.md"
    before, _, rest = out.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{out} has no place for the table: {BEGIN} ... {END}")
    failures = sum(row.failures for row in rows.values())
    counted = f"Seconds: the median of the runs, and the worst in brackets. Runs: {len(files)}; failures: {failures}."
    text = "\n".join([BEGIN, "", machine(), counted, "", *table(rows), "", END])
    out.write_text(before + text + after, encoding="utf-8")
    print(f"{out}: {len(rows)} rows, {len(files)} runs, {failures} failures")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    toolkit.cli.run(main)
