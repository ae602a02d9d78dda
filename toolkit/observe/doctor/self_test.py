"""Trains on one device, on all of this machine's, in two processes, and stopped and resumed; compares the results."""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.devices import inventory
from toolkit.observe.doctor.situation import Finding, failure, ok
from toolkit.observe.doctor.training import STEPS

_LIMIT = 240  # Seconds for each of the three.
# In float32 the order of a sum changes its last digits, and ten steps amplify that.
_LOSS, _WEIGHT = 1e-4, 1e-4
_AGAIN = "Run it again with no other job on the devices; if it fails again, report it with `toolkit doctor --json`"
_MODULE = "toolkit.observe.doctor.training"


def self_test(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for each of the three trainings, and for the one that is resumed.

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
        replicas = max(2, len(inventory.take().gpus))
        several = f"{replicas} replicas" if replicas > 2 else "two replicas"
        mirrored = f"{sys.executable} -m {_MODULE} mirrored {replicas} /tmp/doctor.json"
        workers = f"toolkit launch --workers=2 -m {_MODULE} multi_worker 2 /dev/null"
        for check, strategy, count, cure in (
            (several, "mirrored", replicas, mirrored),
            ("two processes", "multi_worker", 2, workers),
        ):
            many = _trained(environ, folder, strategy, count)
            if isinstance(many, str):
                yield failure(check, many, cure)
                continue
            yield _compared(check, one, many)
            if strategy == "mirrored":
                yield _resumed(many)


def _trained(environ: Mapping[str, str], folder: str, strategy: str, replicas: int) -> dict[str, Any] | str:
    """Returns a training's results, or why it failed."""
    out = pathlib.Path(folder, f"{strategy}.json")
    command = ["-m", _MODULE, strategy, str(replicas), str(out)]
    if strategy == "multi_worker":
        command = ["-m", "toolkit", "launch", "--workers=2", f"--log_dir={folder}", *command]
    own = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
    process = subprocess.Popen(
        [sys.executable, *command],
        # Its job is none of the user's, so another list has it.
        env={**own, "TF_CPP_MIN_LOG_LEVEL": own.get("TF_CPP_MIN_LOG_LEVEL", "3"), "XDG_STATE_HOME": folder},
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


def _resumed(many: Mapping[str, Any]) -> Finding:
    apart = _apart(many["weights"], many["resumed_weights"])
    if apart < _WEIGHT:
        exactly = "the same weights, bit for bit" if apart == 0 else f"weights within {apart:.0e}"
        return ok("resume", f"stopped in the midst of training and resumed: {exactly}")
    return failure("resume", f"a training that was stopped and resumed has other weights, by {apart:.1e}", _AGAIN)


def _apart(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    pairs = zip(mine, theirs, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


def _compared(check: str, one: Mapping[str, Any], many: Mapping[str, Any]) -> Finding:
    loss = max(abs(a - b) for a, b in zip(one["losses"], many["losses"], strict=True))
    weight = _apart(one["weights"], many["weights"])
    rate = f"all-reduce of 16 MiB at {many['bytes_per_second'] / 1e9:.2f} GB/s"
    if many.get("peak_memory"):
        rate += f"; at most {', '.join(f'{peak / 1e6:.0f}' for peak in many['peak_memory'])} MB of tensors in memory"
    # Also false for a NaN.
    if loss < _LOSS and weight < _WEIGHT:
        return ok(check, f"same result as one device (losses within {loss:.0e}, weights within {weight:.0e}); {rate}")
    return failure(check, f"result differs from one device: losses by {loss:.1e}, weights by {weight:.1e}", _AGAIN)
