"""What a launcher computes for up to a thousand tasks: their start, a failure of one, a restart, and the end.

    python -m benchmarks.thousand_tasks --tasks=125,250,500,1000

Agents and tasks are those of tests/launch/simulation.py, under a simulated clock; the launcher's decisions are its own.
So the seconds are those of one core that the launcher itself needs. The exponent says how they grow: 1 is linear.
"""

import importlib
import math
import pathlib
import platform
import sys
import tempfile
import time
from typing import Any

from absl import flags

import toolkit

_TASKS = flags.DEFINE_list("tasks", ["125", "250", "500", "1000"], "Numbers of tasks.")
_ON_A_HOST = flags.DEFINE_integer("on_a_host", 8, "Tasks on each host.", lower_bound=1)


def measure(tasks: int) -> dict[str, float]:
    """Returns seconds of a core: up to the first steps, in a minute of training, and from a failure to steps again."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "launch"))
    import pytest

    simulation: Any = importlib.import_module("simulation")

    def world(**more: Any) -> Any:
        made = simulation.World(1, hosts=-(-tasks // _ON_A_HOST.value), tasks=_ON_A_HOST.value, faults=0, **more)
        made.slow = dict.fromkeys(made.slow, 0.0)
        return made

    def run(made: Any, **options: Any) -> float:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            began = time.process_time()
            _, error = simulation.run(patch, pathlib.Path(folder), made, settle=False, **options)
            spent = time.process_time() - began
        if error is not None:
            raise error
        return spent

    short, long, failing = world(steps=20), world(steps=140), world(steps=20)
    failing.later(6.0, lambda: failing.inject("kill"))
    start = run(short)
    minute = run(long) - start
    return {
        "start and end": start,
        "a minute of steps": minute,
        "a failure and a restart": run(failing, max_restarts=1) - start,
    }


def main() -> None:
    """Measures, and prints a table."""
    sizes = [int(each) for each in _TASKS.value]
    found = [measure(size) for size in sizes]
    print(f"Python {platform.python_version()}, {platform.machine()}; seconds of one core")
    print(f"{'tasks':>6}  " + "  ".join(f"{name:>24}" for name in found[0]))
    for size, each in zip(sizes, found, strict=True):
        print(f"{size:>6}  " + "  ".join(f"{seconds:>24.2f}" for seconds in each.values()))
    for name in found[0]:
        growth = math.log(found[-1][name] / found[0][name]) / math.log(sizes[-1] / sizes[0])
        print(f"{name}: grows by the power {growth:.2f}")


if __name__ == "__main__":
    toolkit.cli.run(main)
