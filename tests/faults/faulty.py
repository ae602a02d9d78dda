"""Jobs that get a fault at a chosen moment, and the figures of what came of it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import time
import uuid

import limits
import processes
import psutil

from toolkit.launch.record import Record

MOMENTS = ("at the start", "in its first checkpoint", "in a step", "between epochs")
SHORT = ("--data=shapes", "--epochs=3", "--steps_per_epoch=20", "--checkpoint_steps=5", "--global_batch_size=32")
RECIPES = {
    "workers": (("--workers=2",), ("-m", "recipes.cifar_multi_worker", *SHORT)),
    "compressed": (
        ("--workers=2",),
        ("-m", "recipes.cifar_multi_worker", *SHORT, "--gradient_compression=powersgd"),
    ),
    "local": (("--workers=2",), ("-m", "recipes.cifar_multi_worker", *SHORT, "--local_steps=3")),
    # In turn, so that nothing depends on who was faster.
    "served": (
        (*processes.FEW, "--evaluator"),
        ("-m", "recipes.cifar_parameter_server", *SHORT, "--max_staleness=0"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a fault.

    Attributes:
        notice: Seconds until the launcher saw that the task had ended.
        down: Seconds until all tasks had.
        again: Seconds until the job that was started again began to write a checkpoint: up to 5 steps after its first.
            Not a number where the next fault came before.
        kept: Step of the newest checkpoint when all tasks had ended.
        resumed: Step after which the job went on.
        said: What the launcher said about it.
    """

    notice: float
    down: float
    again: float
    kept: int
    resumed: int
    said: str


class Faulty(processes.Job):
    """A launched recipe.

    Args:
        folder: Where it is launched.
        kind: One of RECIPES.
        flags: Of the launcher.
        run: The run directory.
        resume: Whether to go on with it.
    """

    LIMIT = 90

    def __init__(self, folder, kind, *flags, run=None, resume=False, recipe=()):
        folder.mkdir(parents=True, exist_ok=True)
        self.run = run or folder / "run"
        self.mark = uuid.uuid4().hex
        tasks, command = RECIPES[kind]
        environ = {**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "FAULTY": self.mark}
        more = [*recipe, *(["--resume"] if resume else [])]
        super().__init__(folder, [*tasks, *flags], [*command, f"--run_dir={self.run}", *more], environ=environ)

    def events(self, kind, *, since=0.0):
        """Lines of the launcher's record."""
        files = (self.folder / "logs").glob("*/events.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [event for event in lines if event["event"] == kind and event["at"] > since]

    def pid(self, task):
        """Of the task's process that was started last."""
        return [event["pid"] for event in self.events("started") if event["task"] == task][-1]

    def checkpoints(self):
        with contextlib.suppress(FileNotFoundError):
            return {path.name for path in (self.run / "checkpoints").iterdir()}
        return set()

    def whole(self):
        return {name for name in self.checkpoints() if name.startswith("step-")}

    def newest(self):
        return max((int(name.split("-")[1]) for name in self.whole()), default=0)

    def reach(self, moment, task, before=frozenset()):
        """Waits for the moment, in the job as it was started last; the time of the first file that wasn't there before.

        The files are looked at often: a checkpoint is written in some 20 ms.
        """
        starts = len({event["attempt"] for event in self.events("started")}) or 1
        while not (launched := sorted((self.folder / "logs").glob("launch-*"))):
            time.sleep(0.02)
        log = Record(launched[-1]).log(task, starts)
        progress = None
        deadline = time.monotonic() + limits.patient(self.LIMIT)
        while True:
            new = self.checkpoints() - before
            progress = progress or (time.time() if new else None)
            if moment == "at the start":
                here = log.exists() and log.read_text(errors="replace").count("logical devices") >= 1
            else:
                names = {
                    "in its first checkpoint": r"\.writing-",
                    "in a step": "step-",
                    "between epochs": r"step-\d+-end",
                }
                here = any(re.match(names[moment], name) for name in new)
            if here:
                break
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < deadline, f"not {moment}\n{self.text[-3000:]}"
            time.sleep(0.02 if moment == "at the start" else 0.0005)
        if moment == "in a step":
            time.sleep(0.03)
        return progress

    def disturb(self, task, moments, number=signal.SIGKILL):
        """Sends a task a signal at each moment, each in the job as it was started last; what came of each."""
        outcomes, pending = {}, None
        self.until(lambda: self.events("started"))
        for moment in (*moments, None):
            progress = self.reach(moment or "in a step", task, pending["before"] if pending else frozenset())
            if pending:
                again = progress - pending["at"] if progress else float("nan")
                resumed = re.findall(r"Resumed after step (\d+)", self.text)
                outcomes[pending["moment"]] = Outcome(
                    notice=pending["notice"],
                    down=pending["down"],
                    again=again,
                    kept=pending["kept"],
                    resumed=int(resumed[-1]) if resumed else 0,
                    said=pending["said"],
                )
            if moment is None:
                return outcomes
            pending = {"moment": moment, **self._kill(task, number)}
        raise AssertionError("not reached")

    def _kill(self, task, number):
        """Kills; returns when the whole job has been started again."""
        started = self.events("started")
        tasks = {event["task"] for event in started}
        failures = self.text.count("failed first")
        os.kill(self.pid(task), number)
        at = time.time()
        self.until(lambda: {event["task"] for event in self.events("ended", since=at)} >= tasks)
        # Only now: a chief that outlives the task for a moment finishes what it was writing.
        kept, before = self.newest(), self.checkpoints()
        ended = self.events("ended", since=at)
        self.until(lambda: len(self.events("started")) >= len(started) + len(tasks))
        return {
            "at": at,
            "kept": kept,
            "before": before,
            "notice": next(event["at"] for event in ended if event["task"] == task) - at,
            "down": max(event["at"] for event in ended) - at,
            "said": "\n".join(re.findall(r"\S+ failed first: .*", self.text)[failures:]),
        }

    def left(self):
        """Processes of this job that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("FAULTY") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def gone(self, *, limit):
        """Seconds until no process of it is left."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() - began < limits.patient(limit), f"left: {left}"
            time.sleep(0.05)
        return time.monotonic() - began

    def finish(self, *, limit=150):
        """Waits for a good end; the digest of the weights."""
        assert self.wait(limit=limit) == 0, self.text[-3000:]
        return weights(self.run)

    def close(self):
        """Ends what is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(Exception):
                self.process.wait(30)
        self.process.kill()
        self.process.wait()
        for process in self.left():
            process.kill()


@contextlib.contextmanager
def faulty(*arguments, **how):
    job = Faulty(*arguments, **how)
    try:
        yield job
    finally:
        job.close()


def within(seconds):
    """Twice a target of docs/reliability.md, and longer on a machine with more than four processes for each core."""
    return seconds * max(2.0, os.getloadavg()[0] / (2 * len(os.sched_getaffinity(0))))


def weights(run: pathlib.Path):
    found = json.loads((run / "summary.json").read_text())
    assert (found["status"], found["steps"]) == ("completed", 60)
    return found["weights_sha256"]
