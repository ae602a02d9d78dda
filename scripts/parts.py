"""Runs the parts of the tests one after another, and prints how each of them ended.

    .venv/bin/python scripts/parts.py ci            # what .ci/run does, once everything is installed
    .venv/bin/python scripts/parts.py all           # everything
    .venv/bin/python scripts/parts.py all launch    # everything that covers toolkit/launch

A test that fails is run once more, alone. If it passes then, it is FLAKY: the part passes, and the list at the end
names the test and its first failure. A test that fails twice fails the run. A part in which more than MOST_FLAKY tests
fail is not run again: that many failures are no accident.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "tests"
MOST_FLAKY = 5
CHECKS = {
    "lint": ("-m", "ruff", "check", "."),
    "format": ("-m", "ruff", "format", "--check", "."),
    "types": ("-m", "mypy"),
    "docs": ("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "build/docs"),
}
SUITES = {
    "test": ("scripts/test", "-m", "not fault and not gpu and not long and not soak"),
    "oldest versions": ("scripts/test-oldest", "-m", "versions"),
    "all on the oldest": ("scripts/test-oldest", "-m", "not long", "tests/strategies", "tests/parallel"),
    "next versions": ("scripts/test-next",),
    "first faults": ("scripts/test", "-m", "first and fault"),
    "long": ("scripts/test", "-m", "long and not fault and not soak"),
    # First steps are compared tensor by tensor, too: tests/conformance/checked.py.
    "checked": (
        *("env", "CHECKED_STEPS=first_step", "scripts/test"),
        *("-m", "slow and not long and not fault and not gpu", "tests/conformance"),
    ),
    "faults": ("scripts/test", "-m", "fault"),
    "soak": ("scripts/test", "-m", "soak"),
    "gpu": ("scripts/test", "-m", "gpu"),
}
CI = ("test", "oldest versions", "next versions", "first faults")
ALL = ("test", "long", "checked", "oldest versions", "all on the oldest", "next versions", "faults", "soak", "gpu")
# They run the same tests whatever has changed.
ALIKE = ("checked", "oldest versions", "all on the oldest", "next versions")
# tests/ mirrors toolkit/; beside the folder of its own name, each room is covered by these.
ALSO_COVERED_BY = {
    "cluster": ("fuzz", "multiprocess"),
    "devices": ("gpu",),
    "strategies": ("conformance", "gpu", "multiprocess", "parallel", "recipes"),
    "parallel": ("conformance", "recipes"),
    "data": ("recipes",),
    "models": ("parallel", "recipes"),
    "training": ("conformance", "faults", "fuzz", "recipes"),
    "launch": ("faults", "fuzz", "multiprocess", "recipes"),
    "observe": ("cli", "recipes"),
    "cli": ("fuzz", "observe", "recipes"),
    "support": ("launch", "training"),
}


@dataclasses.dataclass
class Part:
    """How a part ended.

    Attributes:
        name: Its name.
        seconds: How long it took.
        ok: Whether nothing failed twice.
        passed: How many tests passed.
        failed: How many failed twice.
        skipped: Of each reason, how many tests were skipped.
        flaky: Of each test that failed and then passed, the last line of its failure.
        failures: Of each test that failed, the same, where the part failed.
    """

    name: str
    seconds: float = 0.0
    ok: bool = True
    passed: int = 0
    failed: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    flaky: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


def run_check(name: str) -> Part:
    """Runs the linter or the types."""
    began = time.monotonic()
    code = subprocess.run([sys.executable, *CHECKS[name]], cwd=ROOT, check=False).returncode
    return Part(name, seconds=time.monotonic() - began, ok=code == 0)


def run_suite(name: str, places: list[str]) -> Part:
    """Runs tests, and those that fail once more."""
    began = time.monotonic()
    part = Part(name)
    code, results = run_pytest(name, [*SUITES[name], *places])
    failures = read(results, part)
    again = 1 if code not in (0, 5) else 0  # 5: no test is in this part.
    if code == 1 and 0 < len(failures) <= MOST_FLAKY:
        print(f"\n{name}: {len(failures)} failed. They run once more, alone.", flush=True)
        failed_ones = ["--last-failed", "--last-failed-no-failures=none", "-n0"]
        again, _ = run_pytest(name, [*SUITES[name], *places, *failed_ones], "-again")
        if again == 0:
            part.flaky = failures
            part.passed += len(failures)
    part.ok = again == 0
    part.failures = {} if part.ok else failures
    part.failed = len(part.failures)
    part.seconds = time.monotonic() - began
    return part


def run_pytest(name: str, command: list[str], run: str = "") -> tuple[int, pathlib.Path]:
    """Runs pytest; returns its exit code and the file of its results, whose name ends with the run's."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = RESULTS / f"{name.replace(' ', '-')}{run}.xml"
    results.unlink(missing_ok=True)
    own = [f"--junitxml={results}", "-o", f"cache_dir={RESULTS / 'cache' / name.replace(' ', '-')}"]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([*command, *own], cwd=ROOT, env=environment, check=False).returncode, results


def read(results: pathlib.Path, part: Part) -> dict[str, str]:
    """Adds what a file of results says to a part; returns the tests that failed, each with its failure's last line."""
    failures: dict[str, str] = {}
    if not results.exists():
        return failures
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found = {child.tag: child for child in case}
        failure = found.get("failure", found.get("error"))
        if failure is not None:
            lines = (failure.get("message") or failure.text or "").strip().splitlines() or ["no message"]
            failures[test] = lines[0][:200]
        elif "skipped" in found:
            reason = found["skipped"].get("message", "no reason")
            part.skipped[reason] = part.skipped.get(reason, 0) + 1
        else:
            part.passed += 1
    return failures


def table(parts: list[Part]) -> str:
    """Returns the parts as a table of Markdown."""
    rows = ["| part | passed | failed | skipped | flaky | seconds |", "| --- | --- | --- | --- | --- | --- |"]
    for part in parts:
        counted = part.name not in CHECKS
        word = part.name if part.ok else f"**{part.name} (failed)**"
        skipped = sum(part.skipped.values())
        counts = (part.passed, part.failed, skipped, len(part.flaky)) if counted else ("", "", "", "")
        rows.append(f"| {word} | {' | '.join(map(str, counts))} | {part.seconds:.0f} |")
    return "\n".join(rows)


def skipped(parts: list[Part]) -> str:
    """Returns the skipped tests by reason, as a list of Markdown; "" for none."""
    lines = [f"- {part.name}: {n} x {reason}" for part in parts for reason, n in part.skipped.items()]
    return "\n".join(["Skipped:", "", *lines, ""]) if lines else ""


def flaky(parts: list[Part]) -> str:
    """Returns the tests that failed and then passed, as a list of Markdown; "" for none."""
    lines = [f"- {part.name}: `{test}`: {line}" for part in parts for test, line in part.flaky.items()]
    return "\n".join(["FLAKY (failed, and passed when run alone; mend these first):", "", *lines, ""]) if lines else ""


def failed(parts: list[Part]) -> str:
    """Returns the tests that failed, as a list of Markdown; "" for none."""
    lines = [f"- {part.name}: `{test}`: {line}" for part in parts for test, line in part.failures.items()]
    return "\n".join(["Failed, at least once, in a part that failed:", "", *lines, ""]) if lines else ""


def places_of(room: str) -> list[str]:
    """Returns the folders of tests that cover a room."""
    folders = (room, *ALSO_COVERED_BY.get(room, ()))
    return [f"tests/{folder}" for folder in folders if (ROOT / "tests" / folder).is_dir()]


def main() -> None:
    """Runs what the command line asks for; exits with 1 where something failed twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ci", "all"])
    parser.add_argument("room", nargs="?", choices=sorted(ALSO_COVERED_BY), metavar="ROOM", help="a folder of toolkit/")
    given = parser.parse_args()
    places = places_of(given.room) if given.room else []
    names = CI if given.what == "ci" else ALL
    if given.room not in (None, "strategies", "parallel"):
        names = tuple(name for name in names if name not in ALIKE)
    if shutil.which("nvidia-smi") is None:
        names = tuple(name for name in names if name != "gpu")
    parts = [run_check(name) for name in CHECKS]
    for name in names:
        print(f"\n=== {name}", flush=True)
        parts.append(run_suite(name, [] if name in ALIKE else places))
    print("\n".join(["", table(parts), "", skipped(parts), failed(parts), flaky(parts)]), flush=True)
    sys.exit(0 if all(part.ok for part in parts) else 1)


if __name__ == "__main__":
    main()
