"""The recipe at one size, in a process of its own."""

import ctypes
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import JobStopped, RequestError, ToolkitError
from toolkit.observe.scaling.law import Size
from toolkit.observe.scaling.request import Request
from toolkit.support import redaction, signals

__all__ = ["measure"]

_SHORT = {"epochs": 1, "steps_per_epoch": 60}  # Of which ten warm up. What the user gives stands.
_PR_SET_PDEATHSIG = 1  # prctl(2).
_GRACE = 30  # Seconds to end in.
_TICK = 0.05
_TAIL = 15  # Lines of a failed run's log.


def measure(request: Request, *, tell: Callable[[str], None]) -> list[Size]:
    """Runs the recipe at every size, round after round, and returns what was measured.

    Args:
        request: What.
        tell: Is told what is being run.

    Raises:
        RequestError: The recipe can't be run so; its own message is shown.
        ToolkitError: It failed.
    """
    request.out.mkdir(parents=True, exist_ok=True)
    seen: dict[int, list[dict[str, Any]]] = {size: [] for size in request.replicas}
    batch: float | None = None  # Of a replica, for weak scaling.
    for number in range(request.rounds):
        for replicas in request.replicas:
            where = f", round {number + 1} of {request.rounds}" if request.rounds > 1 else ""
            tell(f"{replicas} {'replica' if replicas == 1 else 'replicas'}{where}")
            summary = _run(request, replicas, number, None if batch is None else round(batch * replicas))
            if request.weak and batch is None:
                batch = summary["global_batch_size"] / replicas
            seen[replicas].append(summary)
    return [_size(replicas, summaries) for replicas, summaries in seen.items()]


def _size(replicas: int, summaries: list[dict[str, Any]]) -> Size:
    rates = [summary["images_per_second"] for summary in summaries]
    middle = statistics.median_low(rates)
    typical = next(summary for summary in summaries if summary["images_per_second"] == middle)
    return Size(
        replicas=replicas,
        images_per_second=middle,
        global_batch=typical["global_batch_size"],
        emulated=bool(typical.get("emulated"))
        or all(str(name).startswith("CPU") for name in typical.get("devices", ())),
        step=typical.get("step"),
    )


def _run(request: Request, replicas: int, number: int, batch: int | None) -> dict[str, Any]:
    directory = request.out / f"replicas-{replicas}-round-{number + 1}"
    flags = [*request.flags, f"--run_dir={directory}"]
    flags += [f"--{name}={value}" for name, value in _SHORT.items() if not request.has(name)]
    if batch is not None:
        flags = [flag for flag in flags if not flag.lstrip("-").startswith("global_batch_size=")]
        flags.append(f"--global_batch_size={batch}")
    if request.kind == "mirrored":
        command = ["-m", request.module, f"--gpus={replicas}", *flags]
    else:
        logs = f"--log_dir={directory}-logs"
        command = ["-m", "toolkit", "launch", f"--workers={replicas}", logs, "-m", request.module, *flags]
    log = directory.with_suffix(".log")
    with log.open("wb") as out:
        code = _finished([sys.executable, *command], out)
    if code:
        raise _failure(request, replicas, code, log)
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            asked=f"{request.module} is to be measured",
            found=f"it ended well, and left no summary.json in its --run_dir ({type(error).__name__})",
            remedy="Name a recipe, such as recipes.cifar_mirrored, or a program that uses toolkit.training.Run",
        ) from error
    if not summary.get("images_per_second"):
        raise RequestError(
            asked=f"{request.module} is to be measured at {replicas} replicas",
            found=f"its {summary.get('steps')} steps are too few, as the first ten warm up",
            remedy="Leave --steps_per_epoch out, or give 30 or more",
        )
    return summary


def _finished(command: list[str], out: Any) -> int:
    """Runs a program; a signal to this process is handed on, and waited for."""
    with signals.recorded() as received:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=_ends_with(os.getpid()),  # noqa: PLW1509 - nothing here starts threads before.
        )
        asked = 0.0
        while process.poll() is None:
            if received and not asked:
                process.send_signal(signal.SIGTERM)
                asked = time.monotonic()
            elif asked and time.monotonic() - asked > _GRACE:
                process.kill()
            time.sleep(_TICK)
    if received:
        raise JobStopped(received[0])
    return process.returncode


def _ends_with(parent: int) -> Callable[[], None]:
    """Returns what a child does first: it asks Linux for a SIGTERM when its parent ends in whatever way."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask


def _failure(request: Request, replicas: int, code: int, log: pathlib.Path) -> ToolkitError:
    text = redaction.masked(log.read_text(errors="replace"), os.environ)
    lines = [line for line in text.splitlines() if line.strip()]
    said = next((line.partition("error: ")[2] for line in reversed(lines) if "error: " in line), "")
    if code == RequestError.exit_code and said:
        other = " Or give --kind=workers." if request.kind == "mirrored" and "toolkit launch" in said else ""
        return RequestError(
            asked=f"{request.module} is to run with {replicas} replicas",
            found=f"it says: {said.rstrip('.')}",
            remedy=f"Its output is in {log}.{other}".rstrip("."),
        )
    if lines and "No module named" in lines[-1]:
        raise RequestError(
            asked=f"-m {request.module} names the recipe",
            found=lines[-1].rpartition(": ")[2],
            remedy="Name a module as `python -m` takes it, such as recipes.cifar_mirrored",
        )
    tail = os.linesep.join(lines[-_TAIL:])
    return ToolkitError(
        f"{request.module} with {replicas} replicas ended with exit code {code}; the end of {log}:\n{tail}"
    )
