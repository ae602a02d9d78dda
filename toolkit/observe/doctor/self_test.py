"""Trains on one device, on two replicas and in two processes, and compares the results."""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.observe.doctor.situation import Finding, failure, ok
from toolkit.observe.doctor.training import STEPS

__all__ = ["self_test"]

_LIMIT = 240  # Seconds for each of the three.
# In float32 the order of a sum changes its last digits, and ten steps amplify that.
_LOSS, _WEIGHT = 1e-4, 1e-4
_MODULE = "toolkit.observe.doctor.training"


def self_test(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for each of the three trainings.

    Bandwidth is that of the sum itself: the bytes of one replica's array by the seconds until every replica has the
    sum.

    Args:
        environ: The processes' environment; TF_CONFIG in it is left out.
    """
    with tempfile.TemporaryDirectory(prefix="toolkit-doctor-") as folder:
        one = _trained(environ, folder, "one_device", 1)
        if isinstance(one, str):
            yield failure("one device", one, "toolkit doctor; the README's section on errors")
            return
        yield ok("one device", f"{STEPS} steps on {one['devices'][0]}, loss {one['losses'][-1]:.4f}")
        for check, strategy in (("two replicas", "mirrored"), ("two processes", "multi_worker")):
            many = _trained(environ, folder, strategy, 2)
            yield failure(check, many, _cure(strategy)) if isinstance(many, str) else _compared(check, one, many)


def _cure(strategy: str) -> str:
    if strategy == "multi_worker":
        return f"toolkit launch --workers=2 -m {_MODULE} multi_worker 2 /dev/null"
    return f"{sys.executable} -m {_MODULE} mirrored 2 /dev/null"


def _trained(environ: Mapping[str, str], folder: str, strategy: str, replicas: int) -> dict[str, Any] | str:
    """Returns a training's results, or why it failed."""
    out = pathlib.Path(folder, f"{strategy}.json")
    command = ["-m", _MODULE, strategy, str(replicas), str(out)]
    if strategy == "multi_worker":
        command = ["-m", "toolkit", "launch", "--workers=2", f"--log_dir={folder}", *command]
    own = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**own, "TF_CPP_MIN_LOG_LEVEL": own.get("TF_CPP_MIN_LOG_LEVEL", "3")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        text, _ = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return f"it hasn't ended after {_LIMIT} s"
    finally:
        if process.poll() is None:
            process.terminate()  # The launcher ends its own tasks.
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        lines = [line for line in text.splitlines() if "rror" in line] or text.splitlines() or ["it said nothing"]
        return f"it ended with exit code {process.returncode}: {lines[-1].strip()}"
    try:
        return json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"its result can't be read ({error})"


def _compared(check: str, one: Mapping[str, Any], many: Mapping[str, Any]) -> Finding:
    loss = max(abs(a - b) for a, b in zip(one["losses"], many["losses"], strict=True))
    pairs = zip(one["weights"], many["weights"], strict=True)
    weight = max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    rate = f"all-reduce of 16 MiB at {many['bytes_per_second'] / 1e9:.2f} GB/s"
    # Also false for a NaN.
    if loss < _LOSS and weight < _WEIGHT:
        return ok(check, f"same result as one device (losses within {loss:.0e}, weights within {weight:.0e}); {rate}")
    return failure(
        check,
        f"result differs from one device: losses by {loss:.1e}, weights by {weight:.1e}",
        "Run it again with no other job on the devices; if it fails again, report it with `toolkit doctor --json`",
    )
