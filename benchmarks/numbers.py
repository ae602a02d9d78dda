"""How far the numbers of models that people train are from one device's: a table in docs/numbers.md.

    python -m benchmarks.numbers

The models and the script are those of tests/conformance/real_models.py, which hold them to limits; here is how far they
are from those, one run each, about ten minutes on two cores.
"""

import pathlib
import platform
import subprocess
import sys
import tempfile
from importlib import metadata

import numpy as np

import toolkit

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT, OUT = ROOT / "tests" / "conformance" / "real_models.py", ROOT / "docs" / "numbers.md"
BEGIN, END = "<!-- Written by benchmarks/numbers.py: -->", "<!-- End of what it writes. -->"
SERVED = ("--chief", "--workers=2", "--ps=2")
RUNS = {  # What is run, by the table's heading: strategy, replicas, the launcher's flags.
    "one device": ("one_device", 1, ()),
    "mirrored, 2": ("mirrored", 2, ()),
    "mirrored, 4": ("mirrored", 4, ()),
    "2 workers": ("multi_worker", 2, ("--workers=2",)),
    "3 workers": ("multi_worker", 3, ("--workers=3",)),
    "2 ps, in turn": ("in_turn_sharded", 2, SERVED),
    "2 ps, free": ("free", 2, SERVED),
}
REFUSED = "accumulating, clipped, averaged"


def main() -> None:
    """Runs all, and writes the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = {heading: seen(pathlib.Path(folder), *run) for heading, run in RUNS.items()}
    text = OUT.read_text()
    before, _, rest = text.partition(BEGIN)
    OUT.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    print(f"Written: {OUT}")


def seen(folder: pathlib.Path, strategy: str, replicas: int, launch: tuple) -> dict:
    """Returns what real_models.py saw of each model under one strategy."""
    out = folder / f"{strategy}{replicas}" / "seen.npz"
    out.parent.mkdir()
    command = [str(SCRIPT), strategy, str(replicas), str(out)]
    if strategy == "free":
        command += [name for name in names(folder) if name != REFUSED]
    run = [sys.executable, *(("-m", "toolkit", "launch", *launch, f"--log_dir={folder / 'logs'}") if launch else ())]
    print(f"{strategy}, {replicas}", flush=True)
    # Workers write the same file in turn; what is kept is one's.
    subprocess.run([*run, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return dict(np.load(out))


def names(folder: pathlib.Path) -> list[str]:
    """Returns the models' names."""
    with np.load(folder / "one_device1" / "seen.npz") as one:
        return [key.removesuffix("/losses") for key in one if key.endswith("/losses")]


def table(found: dict[str, dict]) -> str:
    """Returns the table, as Markdown."""
    one = found["one device"]
    others = [heading for heading in found if heading != "one device"]
    rows = [f"| model | {' | '.join(others)} | saved | exported | resumed |", "| --- |" + " --- |" * (len(others) + 3)]
    for name in [key.removesuffix("/losses") for key in one if key.endswith("/losses")]:
        cells = []
        for heading in others:
            theirs, key = found[heading], "weights" if "in turn" in heading else "losses"
            if f"{name}/{key}" not in theirs:
                cells.append("refused")
                continue
            which = slice(-1, None) if "free" in heading else slice(None)
            mine = one[f"{name}/{key}"][which]
            apart = np.abs(theirs[f"{name}/{key}"][which] - mine).max()
            cells.append(f"{apart / max(1.0, np.abs(mine).max()):.0e}" if apart else "0")
        for key in ("saved", "exported", "resumed"):  # What Keras exports of augmentation draws, and isn't compared.
            left = [float(seen[f"{name}/{key}"]) for seen in found.values() if f"{name}/{key}" in seen]
            cells.append("-" if not left else f"{max(left):.0e}" if max(left) else "0")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("tensorflow", "keras"))
    return "\n".join([*rows, "", f"Python {platform.python_version()}, {versions}, on {platform.machine()}."])


if __name__ == "__main__":
    toolkit.cli.run(main)
