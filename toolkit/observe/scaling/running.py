"""Checks and runs a recipe at several sizes, each in its own process."""

import ctypes
import dataclasses
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
from toolkit.observe.scaling.verdict import Size
from toolkit.support import redaction, signals

__all__ = ["KINDS", "ScalingRequest", "measure"]

KINDS = ("mirrored", "workers")
_MOST = 4096  # Replicas.
_SHORT = {"epochs": 1, "steps_per_epoch": 60}  # Ten of them warm up. The user's own flag takes precedence.
_PR_SET_PDEATHSIG = 1  # prctl(2).
_GRACE = 30  # Seconds in which a process must end.
_TICK = 0.05
_TAIL = 15  # How many lines of a failed run's log are shown.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingRequest:
    """What to measure: a recipe at several sizes.

    Attributes:
        replicas: The sizes, the first of which is what others are compared with.
        weak: Whether each replica's batch stays the same, rather than the global batch.
        kind: "mirrored": replicas of one process, by --gpus; "workers": a process each, by `toolkit launch`.
        rounds: Times that each size is run, in turn.
        module: The recipe.
        flags: The recipe's own flags.
        out: Directory for run directories, logs and the result.

    Raises:
        RequestError: A value is out of its range, or a flag is one that is given by this class itself.
    """

    replicas: tuple[int, ...]
    weak: bool = False
    kind: str = "mirrored"
    rounds: int = 1
    module: str
    flags: tuple[str, ...] = ()
    out: pathlib.Path

    def __post_init__(self) -> None:
        text = ",".join(map(str, self.replicas))
        if not self.replicas or any(not 1 <= size <= _MOST for size in self.replicas):
            raise RequestError(
                asked=f"--replicas={text} lists sizes",
                found=f"sizes are whole numbers from 1 to {_MOST:,}",
                remedy="Write such as --replicas=1,2,4",
            )
        if list(self.replicas) != sorted(set(self.replicas)):
            raise RequestError(
                asked=f"--replicas={text} lists sizes", found="they don't grow", remedy="List each once, smallest first"
            )
        RequestError.check_choice(self.kind, KINDS, asked=f"--kind={self.kind}", found="there is no such kind")
        if self.rounds < 1:
            raise RequestError(asked=f"--rounds={self.rounds}", found="it is less than 1", remedy="Give 1 or more")
        if any(self.out.glob("replicas-*")):
            raise RequestError(
                asked=f"--out={self.out} is where runs go",
                found="it holds runs of an earlier measurement",
                remedy="Name another directory, or leave --out out",
            )
        for flag in self.flags:
            name = flag.lstrip("-").partition("=")[0]
            if name in ("run_dir", "resume", *(["gpus"] if self.kind == "mirrored" else [])):
                raise RequestError(
                    asked=f"{flag} is for the recipe",
                    found=f"toolkit scaling gives it --{name} itself",
                    remedy="Leave it out",
                )

    def has(self, name: str) -> bool:
        """Returns whether a flag of the recipe is given."""
        return any(flag.lstrip("-").partition("=")[0] == name for flag in self.flags)


def measure(request: ScalingRequest, *, show: Callable[[str], None]) -> list[Size]:
    """Runs the recipe at every size, round after round, and returns the measurements.

    Args:
        request: The recipe and the sizes.
        show: Called with a line before each run.

    Raises:
        RequestError: The recipe can't be run so; its own message is shown.
        ToolkitError: It failed.
    """
    request.out.mkdir(parents=True, exist_ok=True)
    seen: dict[int, list[dict[str, Any]]] = {size: [] for size in request.replicas}
    batch: float | None = None  # The batch of one replica, for weak scaling.
    for number in range(request.rounds):
        for replicas in request.replicas:
            where = f", round {number + 1} of {request.rounds}" if request.rounds > 1 else ""
            show(f"{replicas} {'replica' if replicas == 1 else 'replicas'}{where}")
            summary = _run(request, replicas, number, None if batch is None else round(batch * replicas))
            if request.weak and batch is None:
                batch = summary["global_batch_size"] / replicas
            seen[replicas].append(summary)
    return [_size(replicas, summaries) for replicas, summaries in seen.items()]


def _size(replicas: int, summaries: list[dict[str, Any]]) -> Size:
    middle = statistics.median_low(map(_rate, summaries))
    typical = next(summary for summary in summaries if _rate(summary) == middle)
    return Size(
        replicas=replicas,
        examples_per_second=middle,
        global_batch=typical["global_batch_size"],
        emulated=bool(typical.get("emulated"))
        or all(str(name).startswith("CPU") for name in typical.get("devices", ())),
        step=typical.get("step"),
    )


def _rate(summary: dict[str, Any]) -> float:
    """Returns examples per second, which earlier versions called images per second; 0 if neither is there."""
    return summary.get("examples_per_second") or summary.get("images_per_second") or 0.0


def _run(request: ScalingRequest, replicas: int, number: int, batch: int | None) -> dict[str, Any]:
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
    if not _rate(summary):
        raise RequestError(
            asked=f"{request.module} is to be measured at {replicas} replicas",
            found=f"its {summary.get('steps')} steps are too few, as the first ten warm up",
            remedy="Leave --steps_per_epoch out, or give 30 or more",
        )
    return summary


def _finished(command: list[str], out: Any) -> int:
    """Runs a program and returns its exit code. A signal to this process ends the program and is then raised."""
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
    """Returns what a child does first: it asks Linux for a SIGTERM when its parent ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def ask() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask


def _failure(request: ScalingRequest, replicas: int, code: int, log: pathlib.Path) -> ToolkitError:
    text = redaction.masked(log.read_text(errors="replace"), os.environ)
    lines = [line for line in text.splitlines() if line.strip()]
    message = next((line.partition("error: ")[2] for line in reversed(lines) if "error: " in line), "")
    if code == RequestError.exit_code and message:
        other = " Or give --kind=workers." if request.kind == "mirrored" and "toolkit launch" in message else ""
        return RequestError(
            asked=f"toolkit scaling runs {request.module} with {replicas} replicas",
            found=f"the recipe ends with: {message.rstrip('.')}",
            remedy=f"See its output in {log}.{other}".rstrip("."),
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
