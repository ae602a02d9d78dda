"""Half an hour of faults: every minute something happens to one of two workers, and the training must end as if not.

    python -m benchmarks.soak --minutes=30

`toolkit launch --workers=2 --max_restarts=...` trains the multi-worker recipe on the embedded data, as
many steps as take about that long. The faults, in an order that --seed decides, to a random worker:
SIGKILL; SIGTERM; SIGSTOP for 5 s; SIGSTOP for good; and SIGKILL while a checkpoint is written. At the
end: exit code 0, every step counted once, a loss that fell, a launcher that grew neither in memory
nor in open files, and no process left. Exit code 1 where one of them doesn't hold. It says which share of the time made
progress, and where the rest went.
"""

import contextlib
import csv
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any

import psutil
from absl import flags

import toolkit

_MINUTES = flags.DEFINE_float("minutes", 30, "How long there are faults.", lower_bound=0.5)
_BETWEEN = flags.DEFINE_float("seconds_between_faults", 60, "From one fault to the next.", lower_bound=5)
_SEED = flags.DEFINE_integer("seed", 1, "Decides which faults, and to whom.")
_OUT = flags.DEFINE_string("out", "soak.json", "Where the figures go.")
_FOLDER = flags.DEFINE_string("folder", None, "Where the job runs and leaves its logs. Default: a temporary one.")

ROOT = pathlib.Path(__file__).parent.parent
BATCH = 64
EPOCHS = 20
KINDS = ("kill", "terminate", "pause", "stop", "kill in a write")
_SHARE = 0.55  # Of the time, that goes to training: a fault costs a start, and what is lost of it.
_MARK = "TOOLKIT_SOAK"
_SAMPLES = 10  # First ones after the warm-up, and last ones, that are compared.
_MEBIBYTES = 8  # That the launcher may grow by.
_DESCRIPTORS = 2  # Each task's connection may be there or not; what a restart left open would be many times as many.


@dataclasses.dataclass
class Fault:
    """What was done to whom, and what came of it.

    Attributes:
        at: Seconds since the start.
        kind: One of KINDS.
        task: Such as "worker:0".
        seconds_to_progress: Until the first checkpoint of a job that was started again, or went on; None if another
            fault came before.
        beyond: Step of the last checkpoint before.
    """

    at: float
    kind: str
    task: str
    seconds_to_progress: float | None = None
    beyond: int = 0


class Soak:
    """One launched job, its faults and its samples.

    Args:
        folder: Where it runs.
        steps_per_epoch: Of EPOCHS epochs.
        seed: Of the faults.
    """

    def __init__(self, folder: pathlib.Path, *, steps_per_epoch: int, seed: int) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.samples: list[dict[str, Any]] = []
        self._chance = random.Random(seed)
        self._kinds: list[str] = []
        self._disturbed: set[psutil.Process] = set()
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        # The time between two restarts grows while they are in the window: a fault a minute ago is forgiven.
        flags_ = ["--max_restarts=1000", "--start_timeout=60", f"--log_dir={folder / 'logs'}"]
        recipe = [f"--epochs={EPOCHS}", f"--steps_per_epoch={steps_per_epoch}", "--checkpoint_steps=10"]
        with (folder / "launch.out").open("wb") as out:
            self.launcher = psutil.Popen(
                command(*flags_, recipe=[*recipe, "--run_dir=run"]),
                cwd=folder,
                env=environment() | {_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def run(self, *, minutes: float, between: float) -> None:
        """Does faults until the time is up, and waits for the job's end.

        Raises:
            TimeoutError: It takes more than twice as long.
        """
        due = between
        while self.launcher.poll() is None:
            if self.seconds > 120 * minutes + 300:
                raise TimeoutError(f"still running after {self.seconds:.0f} s: {self.folder / 'launch.out'}")
            tasks = self.tasks()
            self._sample(tasks)
            self._look_for_progress(tasks)
            if self.seconds >= due and self.seconds < 60 * minutes and len(tasks) == 2 and self._step():
                due = self.seconds + between
                self._do(self._next_kind(), tasks)
            time.sleep(0.5)

    def close(self) -> list[psutil.Process]:
        """Returns the processes that are left, and ends them and the launcher."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        time.sleep(1)
        left = [process for process in psutil.process_iter() if self._is_mine(process)]
        for process in left:
            process.kill()
        return left

    def tasks(self) -> dict[str, psutil.Process]:
        """Returns the workers that run now, by name."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in (task for agent in self.launcher.children() for task in agent.children()):
                with contextlib.suppress(psutil.Error):
                    name = process.environ().get("TOOLKIT_STATUS", "").partition("@")[0]
                    if name and process.status() != psutil.STATUS_ZOMBIE:
                        found[name] = process
        return found

    def _is_mine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _next_kind(self) -> str:
        if not self._kinds:
            self._kinds = list(KINDS)
            self._chance.shuffle(self._kinds)
        return self._kinds.pop()

    def _do(self, kind: str, tasks: dict[str, psutil.Process]) -> None:
        name = "worker:0" if kind == "kill in a write" else self._chance.choice(sorted(tasks))
        if kind == "kill in a write":
            writing = self.folder / "run" / "checkpoints"
            deadline = time.monotonic() + 30
            while not list(writing.glob(".writing-*")) and time.monotonic() < deadline:
                time.sleep(0.0005)
        fault = Fault(at=round(self.seconds, 1), kind=kind, task=name, beyond=self._step())
        self.faults.append(fault)
        self._disturbed = set(tasks.values())
        print(f"{fault.at:7.1f} s: {kind} {name}", flush=True)
        with contextlib.suppress(psutil.Error):
            if kind == "terminate":
                tasks[name].terminate()
            elif kind.startswith("kill"):
                tasks[name].kill()
            else:
                tasks[name].suspend()
                if kind == "pause":
                    time.sleep(5)
                    tasks[name].resume()

    def _step(self) -> int:
        """The newest checkpoint's step, 0 where there is none."""
        names = [path.name for path in (self.folder / "run" / "checkpoints").glob("step-*")]
        return max((int(name.split("-")[1]) for name in names), default=0)

    def _look_for_progress(self, tasks: dict[str, psutil.Process]) -> None:
        if self._disturbed & set(tasks.values()) and self.faults[-1].kind != "pause":
            self.faults[-1].beyond = self._step()  # A chief that outlives the other finishes what it was writing.
        elif self.faults and self.faults[-1].seconds_to_progress is None and self._step() > self.faults[-1].beyond:
            self.faults[-1].seconds_to_progress = round(self.seconds - self.faults[-1].at, 1)

    def _sample(self, tasks: dict[str, psutil.Process]) -> None:
        with contextlib.suppress(psutil.Error):
            found = {"launcher": size(self.launcher), **{name: size(process) for name, process in tasks.items()}}
            self.samples.append({"at": round(self.seconds, 1), **found})


def size(process: psutil.Process) -> dict[str, float]:
    """Returns resident memory in MiB and the number of open file descriptors."""
    return {"mebibytes": round(process.memory_info().rss / 2**20, 2), "descriptors": process.num_fds()}


def command(*launch: str, recipe: list[str]) -> list[str]:
    """Returns the command line of a job."""
    start = [sys.executable, "-m", "toolkit", "launch", "--show=all", "--workers=2", *launch]
    return [*start, "-m", "recipes.cifar_multi_worker", "--data=shapes", f"--global_batch_size={BATCH}", *recipe]


def environment() -> dict[str, str]:
    """Returns this process's, with the toolkit to be found."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def steps_per_second(folder: pathlib.Path) -> float:
    """Measures an undisturbed job."""
    recipe = ["--epochs=2", "--steps_per_epoch=60", "--checkpoint_steps=10", "--run_dir=rate"]
    out = (folder / "rate.out").open("wb")
    with out:
        subprocess.run(
            command(recipe=recipe), cwd=folder, env=environment(), stdout=out, stderr=out, check=True, timeout=600
        )
    return json.loads((folder / "rate" / "summary.json").read_text())["images_per_second"] / BATCH


def growth(samples: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Returns the median of the launcher's first samples after the warm-up, and of its last ones.

    Only samples with both workers count, and a fifth of them is the warm-up.
    """
    whole = [sample["launcher"][key] for sample in samples if len(sample) == 4]
    rest = whole[len(whole) // 5 :]
    return statistics.median(rest[:_SAMPLES]), statistics.median(rest[-_SAMPLES:])


def figures(soak: Soak, *, steps: int, left: list[psutil.Process]) -> dict[str, Any]:
    """Returns what came of it, and whether that is as it should be."""
    summary, losses = {}, []
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((soak.folder / "run" / "summary.json").read_text())
        with (soak.folder / "run" / "history.csv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
    memory, descriptors = growth(soak.samples, "mebibytes"), growth(soak.samples, "descriptors")
    said = (soak.folder / "launch.out").read_text(errors="replace")
    back = [fault.seconds_to_progress for fault in soak.faults if fault.seconds_to_progress is not None]
    largest = {
        name: max(sample[name]["mebibytes"] for sample in soak.samples if name in sample)
        for name in ("worker:0", "worker:1")
    }
    return {
        "minutes": round(soak.seconds / 60, 1),
        "faults": len(soak.faults),
        "restarts": said.count("launch: starting the job again"),
        "exit_code": soak.launcher.returncode,
        "steps": [summary.get("steps"), steps],
        "loss": [losses[0], losses[-1]] if losses else None,
        "seconds_to_progress": [statistics.median(back), max(back)] if back else None,
        "launcher_mebibytes": memory,
        "launcher_descriptors": descriptors,
        "largest_task_mebibytes": largest,
        "left": len(left),
        "goodput": summary.get("goodput"),
        "holds": {
            "exit code 0": soak.launcher.returncode == 0,
            "every step once": summary.get("steps") == steps and len(losses) == EPOCHS,
            "loss fell": bool(losses) and losses[-1] < losses[0],
            "launcher's memory": memory[1] - memory[0] <= _MEBIBYTES,
            "launcher's descriptors": descriptors[1] - descriptors[0] <= _DESCRIPTORS,
            "no process left": not left,
        },
    }


def main() -> None:
    """Measures the speed, then soaks; prints and writes the figures."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(_FOLDER.value or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        rate = steps_per_second(folder)
        per_epoch = max(10, int(60 * _MINUTES.value * rate * _SHARE / EPOCHS))
        print(f"{rate:.1f} steps/s undisturbed; {EPOCHS} epochs of {per_epoch} steps", flush=True)
        soak = Soak(folder, steps_per_epoch=per_epoch, seed=_SEED.value)
        try:
            soak.run(minutes=_MINUTES.value, between=_BETWEEN.value)
        finally:
            left = soak.close()
        found = figures(soak, steps=EPOCHS * per_epoch, left=left)
    for name, value in found.items():
        if name != "holds":
            print(f"{name:<24} {value}")
    for name, holds in found["holds"].items():
        print(f"{name:<24} {'yes' if holds else 'NO'}")
    details = {"faults_done": [dataclasses.asdict(fault) for fault in soak.faults], "samples": soak.samples}
    pathlib.Path(_OUT.value).write_text(json.dumps({**found, "seed": _SEED.value, **details}, indent=1) + "\n")
    if not all(found["holds"].values()):
        sys.exit(1)


if __name__ == "__main__":
    toolkit.cli.run(main)
