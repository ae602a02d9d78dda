"""Time from the start to the first step: `toolkit launch` against the same two processes started by hand.

    python -m benchmarks.launch_start [--pairs=7]

By hand means two processes with their TF_CONFIG and nothing that watches them. Both train the
multi-worker recipe on the embedded data; the clock stops when the chief's log says that the first
epoch, of one step, is done. The two ways take turns; the figure is the median of the pairs' ratios.
Target: at most 1.10.
"""

import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from absl import flags

import toolkit

_PAIRS = flags.DEFINE_integer("pairs", 7, "Pairs to run.", lower_bound=1)
RECIPE = ["-m", "recipes.cifar_multi_worker", "--data=shapes", "--epochs=1", "--steps_per_epoch=1"]
ROOT = pathlib.Path(__file__).parent.parent


def by_hand(folder: str) -> list[subprocess.Popen]:
    """Starts two workers."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    started = []
    for number in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": number}}
        started.append(_start([sys.executable, *RECIPE], folder, TF_CONFIG=json.dumps(config)))
    return started


def launched(folder: str) -> list[subprocess.Popen]:
    """Starts the launcher."""
    return [_start([sys.executable, "-m", "toolkit", "launch", "--workers=2", "--show=worker:0", *RECIPE], folder)]


def _start(command: list[str], folder: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def seconds(start: Callable[[str], list[subprocess.Popen]]) -> float:
    """Returns the seconds until the first epoch's line."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        processes = start(folder)
        if processes[0].stdout is None:
            raise TypeError("there is no output to read")
        for line in processes[0].stdout:
            if "epoch 1/1:" in line:
                break
        else:
            raise RuntimeError("the training failed")
        taken = time.perf_counter() - began
        for process in processes:
            process.communicate()
        return taken


def main() -> None:
    """Prints each pair and the median ratio."""
    ratios = []
    for number in range(_PAIRS.value):
        ways = [by_hand, launched] if number % 2 else [launched, by_hand]
        taken = {way.__name__: seconds(way) for way in ways}
        ratios.append(taken["launched"] / taken["by_hand"])
        print(
            f"by hand {taken['by_hand']:.2f} s, launched {taken['launched']:.2f} s, ratio {ratios[-1]:.3f}", flush=True
        )
    print(f"median of {_PAIRS.value}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    toolkit.cli.run(main)
