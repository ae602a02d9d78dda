"""Plants faults in a copy of the tree, one after another, and runs the tests that should notice.

    python -m tests.planted [NAME ...]      those whose names contain one of these; all of them without
    python -m tests.planted --room=step     those of a folder

It prints which test noticed, after how many seconds, and writes the same to tests/planted/results.csv.
"""

import argparse
import csv
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from faults import FAULTS, Fault

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = pathlib.Path(__file__).parent / "results.csv"
_LIMIT = 1800.0  # Seconds for the tests of one fault.


def main() -> int:
    """Plants, and returns 1 if one wasn't noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--room", default="", metavar="FOLDER")
    given = parser.parse_args()
    chosen = [each for each in FAULTS if not given.names or any(name in each.name for name in given.names)]
    chosen = [each for each in chosen if given.room in str(pathlib.Path(each.path).parent)]
    found = read()
    with tempfile.TemporaryDirectory(prefix="toolkit-planted-") as folder:
        tree = copied(pathlib.Path(folder, "tree"))
        for fault in chosen:
            began = time.monotonic()
            by = noticed_by(fault, tree)
            found[fault.name] = (by, f"{time.monotonic() - began:.0f}")
            print(f"{fault.name}: {by or 'NOT NOTICED'} ({found[fault.name][1]} s)", flush=True)  # noqa: T201
            write(found)
    return int(any(not found[each.name][0] for each in chosen))


def copied(tree: pathlib.Path) -> pathlib.Path:
    """Copies what git tracks, and what it would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def planted(fault: Fault, text: str) -> str:
    """Returns a file with a fault in it."""
    lines = text.splitlines(keepends=True)
    places = [number for number, each in enumerate(lines) if each.strip() == fault.line]
    if len(places) != 1:
        raise ValueError(f"{fault.name}: {fault.path} has the line {len(places)} times: {fault.line}")
    (place,) = places
    lines[place] = lines[place].replace(fault.line, fault.instead)
    return "".join(lines)


def noticed_by(fault: Fault, tree: pathlib.Path) -> str:
    """Returns the first test that fails with a fault in the tree; "" if none does."""
    path = tree / fault.path
    before = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, before), encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for each in fault.tests:
            flags = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-W", "ignore"]
            words = each.split() if " -m " in each else [*each.split(), "-m", "not long and not fault and not soak"]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *flags, *words],
                cwd=tree, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False,
            )  # fmt: skip
            failed = re.search(r"^(FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode == 1 and failed:
                return failed[2].partition("::")[2] or failed[2]
            if done.returncode not in (0, 1):
                raise RuntimeError(f"{fault.name}: pytest {each} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    finally:
        path.write_text(before, encoding="utf-8")
    return ""


def read() -> dict[str, tuple[str, str]]:
    """Returns what is known of each fault: the test that noticed, and after how many seconds."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {row["fault"]: (row["noticed by"], row["seconds"]) for row in csv.DictReader(file)}


def write(found: dict[str, tuple[str, str]]) -> None:
    """Keeps that, in the order of the table."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["fault", "room", "noticed by", "seconds"])
        for each in FAULTS:
            if each.name in found:
                writer.writerow([each.name, pathlib.Path(each.path).parent.name, *found[each.name]])


if __name__ == "__main__":
    sys.exit(main())
