"""Measures how a recipe's speed grows with the number of replicas, and finds what limits it.

The recipe runs at each size in its own process. Strong scaling, a fixed global batch: Amdahl's law (1967),
speed-up = 1 / (s + (1 - s) / n). Weak scaling, a fixed batch of each replica: Gustafson's law (1988),
speed-up = n - s (n - 1).
"""

import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toolkit.errors import JobStopped, RequestError, ToolkitError
from toolkit.support import redaction, signals

__all__ = ["ScalingRequest", "Size", "measure", "serial_share", "share_cores", "verdict"]

_NOTABLE = 0.2  # A smaller share of a step doesn't limit the speed.
_ADVICE = {
    "communication": "Give each replica more examples (--global_batch_size), send gradients in 16 bits "
    "(--gradient_dtype=float16), or look at `toolkit plan`: sharded FC layers exchange less.",
    "input": "Make batches faster: read from memory or a faster disk, do less work for each example in Python, or "
    "prefetch more; more replicas won't help.",
    "other": "Python between steps takes its time: fewer callbacks that act on every batch, or "
    "compile(steps_per_execution=10).",
    "compute": "More replicas, or faster ones, help; nothing else is in the way.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The measurements at one size: medians over the rounds.

    Attributes:
        replicas: The number of replicas.
        examples_per_second: The rate of all replicas together.
        global_batch: Examples of a step.
        emulated: Whether replicas share the cores of this machine.
        step: Milliseconds of a step and its parts, as the `Breakdown` of a run has them; None if not measured.
    """

    replicas: int
    examples_per_second: float
    global_batch: int
    emulated: bool
    step: dict[str, float] | None

    @property
    def milliseconds(self) -> float:
        """The time of a step."""
        return 1e3 * self.global_batch / self.examples_per_second


def speed_ups(sizes: Sequence[Size]) -> list[float]:
    """Returns each size's examples per second relative to one replica of the first size."""
    one = sizes[0].examples_per_second / sizes[0].replicas
    return [size.examples_per_second / one for size in sizes]


def serial_share(sizes: Sequence[Size], *, weak: bool) -> float | None:
    """Returns the share of one replica's time that more replicas don't shorten, by least squares over all sizes.

    From 0, all of it can be parallelised, to 1, none; beyond that more replicas are slower than one. None for one size.

    Args:
        sizes: The first is what the others are compared with; its own share isn't seen where it has several replicas.
        weak: Whether to take Gustafson's law, and not Amdahl's.
    """
    pairs = [
        (size.replicas / sizes[0].replicas, up / sizes[0].replicas)
        for size, up in zip(sizes, speed_ups(sizes), strict=True)
    ][1:]
    if not pairs:
        return None
    # Gustafson: n - S = s (n - 1). Amdahl: 1/S - 1/n = s (1 - 1/n), for one size Karp and Flatt's measure (1990).
    points = [(n - 1, n - up) if weak else (1 - 1 / n, 1 / up - 1 / n) for n, up in pairs]
    return max(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))


def bound(size: Size) -> str | None:
    """Returns what limits a size: "communication", "input", "other" or "compute"; None without a profile."""
    if not size.step or not size.step.get("milliseconds"):
        return None
    shares = {
        part: size.step.get(part, 0.0) / size.step["milliseconds"] for part in ("communication", "input", "other")
    }
    worst = max(shares, key=shares.__getitem__)
    return worst if shares[worst] >= _NOTABLE else "compute"


def share_cores(sizes: Sequence[Size]) -> bool:
    """Returns whether replicas share CPU cores, so that their speed says nothing."""
    return sizes[-1].emulated and sizes[-1].replicas > 1


def verdict(sizes: Sequence[Size], *, weak: bool) -> list[str]:
    """Returns sentences: how well it scales, what limits it, and what to do; or why that can't be judged.

    Args:
        sizes: As measured, smallest first.
        weak: Whether each replica's batch was kept, rather than the global batch.
    """
    if share_cores(sizes):
        sentences = [
            "These replicas share the same CPU cores: the figures show that the recipe runs, but not how it scales. "
            "Measure it with one GPU for each replica, or with one host for each (--kind=workers)."
        ]
    else:
        sentences = [*_speed(sizes, weak=weak), *_bound(sizes[-1])]
    return [*sentences, *([_batch(sizes, weak=weak)] if len(sizes) > 1 else [])]


def _speed(sizes: Sequence[Size], *, weak: bool) -> Iterator[str]:
    last, up = sizes[-1], speed_ups(sizes)[-1]
    share = serial_share(sizes, weak=weak)
    if share is None:
        return
    yield f"{last.replicas} replicas are {up:.2f} times as fast as one: an efficiency of {up / last.replicas:.0%}."
    if share >= 1:
        yield "More replicas don't make it faster."
        return
    yield f"{share:.0%} of one replica's time can't be parallelised ({'Gustafson' if weak else 'Amdahl'}'s law)."
    if share > 0 and not weak:
        yield f"With this batch, no number of replicas is more than {1 / share:.1f} times as fast."


def _bound(size: Size) -> Iterator[str]:
    what = bound(size)
    if what is not None and size.step is not None:
        part = size.step.get(what, 0.0) / size.step["milliseconds"]
        name = "Python" if what == "other" else what
        yield f"With {size.replicas} replicas, {name} limits the speed ({part:.0%} of a step). {_ADVICE[what]}"


def _batch(sizes: Sequence[Size], *, weak: bool) -> str:
    first, last = sizes[0], sizes[-1]
    if weak:
        return (
            f"The global batch grew from {first.global_batch:,} to {last.global_batch:,}: the recipes raise the "
            "learning rate in proportion and warm it up (Goyal et al., arXiv 1706.02677). Check the accuracy too "
            "before you use that batch."
        )
    each = last.global_batch / last.replicas
    return (
        f"The global batch stayed {last.global_batch:,}, so each replica has {each:g} examples, and the learning rate "
        "needs no change. Use --weak to keep each replica's batch instead."
    )


KINDS = ("mirrored", "workers")
_MOST = 4096  # Replicas.
_SHORT = {"epochs": 1, "steps_per_epoch": 60}  # Ten of them warm up. The user's own flag takes precedence.
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
    return [_size_of(replicas, summaries) for replicas, summaries in seen.items()]


def _size_of(replicas: int, summaries: list[dict[str, Any]]) -> Size:
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

    def ask() -> None:
        signals.end_with_parent(signal.SIGTERM)
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
