"""What one GPU shows of this project: unattended, in less than ten minutes, everything in one folder.

    python -m benchmarks.one_gpu --out=DIR [--only=speed,overlap] [--place=CPU]

Each part is a process with its own limit, whose output goes to DIR/PART.log; what it measured is gathered in
DIR/figures.json, and DIR/summary.txt has a line for each. One card is two logical GPUs wherever two replicas are
needed. With --place=CPU logical CPU devices stand in and everything is small: a rehearsal, whose figures say nothing.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from absl import flags

import toolkit

_OUT = flags.DEFINE_string("out", None, "Folder for everything.", required=True)
_ONLY = flags.DEFINE_list("only", [], "Parts to run; default: all.")
_PLACE = flags.DEFINE_enum("place", "GPU", ["GPU", "CPU"], "CPU rehearses it without a GPU.")
_SECONDS = flags.DEFINE_integer("seconds", 560, "No part begins, and none goes on, after so many.", lower_bound=60)
ROOT = pathlib.Path(__file__).parent.parent
CASES = ["-m", "benchmarks.one_gpu_cases"]


def parts(place: str, out: pathlib.Path) -> Iterator[tuple[str, int, Sequence[str]]]:
    """Yields each part's name, its most seconds, and what Python runs."""
    gpu = place == "GPU"
    emulate = f"--emulate={'never' if gpu else 'always'}"
    two = ["--gpus=2", *(["--split_gpus=2", "--memory=0.8"] if gpu else [])]

    def recipe(name: str, *given: str) -> list[str]:
        size = ["--epochs=3", "--global_batch_size=512"] if gpu else ["--epochs=1", "--steps_per_epoch=3"]
        common = [f"--run_dir={out / name}", "--data=shapes", emulate, *size]
        return ["-m", "recipes.cifar_mirrored", *common, *given]

    yield "versions", 60, [*CASES, "versions", place]
    # What no run has measured yet comes first.
    batches = (
        {"small_cnn": "2048", "vgg16": "512", "vit": "512", "text": "256"} if gpu else {"small_cnn": "64", "text": "8"}
    )
    for network, batch in batches.items():
        yield f"speed_{network}", 120, [*CASES, "speed", place, network, batch]
    yield "overlap", 100, [*CASES, "overlap", place]
    yield "nccl", 60, [*CASES, "nccl", place]
    weights = "83_000_000" if gpu else "1_000_000"  # With Adam, 1 GB.
    yield "checkpoint", 90, ["-m", "benchmarks.checkpoint_pause", f"--weights={weights}", "--rounds=3"]
    networks = "resnet50,small_cnn,vit" if gpu else "small_cnn"
    yield "predictions", 150, ["-m", "benchmarks.predictions", f"--networks={networks}", "--rounds=1", emulate]
    # Those that measure a card's memory would see each other's; `memory` does it.
    chosen = ["-m", "gpu", "-k", "not memory"] if gpu else ["-m", "long", "-k", "seen"]
    pytest = ["-m", "pytest", "-p", "no:benchmark", "-o", "addopts=--timeout=200"]
    yield "tests", 200, [*pytest, *chosen, "-n", "3", "tests/gpu"]
    yield "smoke", 200, [*pytest, "-m", "smoke", "-n", "3", "tests"]
    # What the run of docs/measured.md has measured.
    yield "doctor", 60, ["-m", "toolkit", "doctor", "--self_test"]
    yield "devices", 60, ["-m", "toolkit", "devices"]
    yield "numbers", 150, [*CASES, "numbers", place]
    yield "recipe_1", 90, recipe("recipe_1", "--gpus=1")
    yield "recipe_2", 90, recipe("recipe_2", *two)
    for way in ("growth", "2048", "0.25", "all"):
        yield f"memory_{way}", 60, [*CASES, "memory", place, way]
    yield "visible_none", 60, recipe("visible_none", "--visible_devices=-1", "--epochs=1", "--steps_per_epoch=3")
    yield "visible_first", 60, recipe("visible_first", "--visible_devices=0", "--epochs=1", "--steps_per_epoch=3")
    yield "visible_wrong", 60, recipe("visible_wrong", "--visible_devices=7", "--epochs=1", "--steps_per_epoch=3")
    yield "profile", 90, recipe("profile", "--gpus=1", "--profile=3", "--epochs=1", "--steps_per_epoch=20")
    for network in ("small_cnn", "alexnet", "vit"):
        plan = ["-m", "toolkit", "plan", network, "--replicas=2", "--device=H100", "--global_batch_size=512"]
        yield f"plan_{network}", 60, plan


def run(name: str, limit: float, arguments: Sequence[str], out: pathlib.Path) -> dict:
    """Returns what a part found, how long it took, and how it ended."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "COLUMNS": "100"}
    began = time.monotonic()
    with open(out / f"{name}.log", "wb") as log:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = f"over {limit:.0f} s"
            os.killpg(process.pid, 9)
            process.wait()
    text = (out / f"{name}.log").read_text(errors="replace")
    found = [json.loads(line) for line in re.findall(r"^FOUND (.*)$", text, re.MULTILINE)]
    summary = out / name / "summary.json"
    if summary.exists():
        kept = json.loads(summary.read_text())
        found.append({key: kept[key] for key in ("devices", "images_per_second", "weights_sha256", "test_accuracy")})
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), "found": found}


def main() -> None:
    """Runs the parts and writes what they found."""
    out = pathlib.Path(_OUT.value).absolute()
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict] = {}
    until = time.monotonic() + _SECONDS.value
    for name, limit, arguments in parts(_PLACE.value, out):
        if _ONLY.value and not any(name.startswith(each) for each in _ONLY.value):
            continue
        left = until - time.monotonic()
        figures[name] = run(name, min(limit, left), arguments, out) if left > 5 else {"ended": "no time left"}
        (out / "figures.json").write_text(json.dumps(figures, indent=1))
        lines = [f"{name}: ended {figures[name]['ended']} after {figures[name].get('seconds', 0)} s"]
        lines += [f"  {json.dumps(each)}" for each in figures[name].get("found", [])]
        with open(out / "summary.txt", "a") as file:
            file.writelines(f"{line}\n" for line in lines)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    toolkit.cli.run(main)
