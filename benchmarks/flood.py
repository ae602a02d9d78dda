"""Steps of a job of two hosts while strangers flood its launcher, beside its steps while nobody does.

    sudo python -m benchmarks.flood [--pairs=6] [--seconds=10] [--json]

Two network namespaces stand for the hosts; the launchers meet by --rendezvous. In the windows with a flood, 2,000
connections a minute come from the other host to the port at which the first launcher listens: silent ones, slow ones
that send a byte now and then, and ones that send a line without an end. All stay until the launcher hangs up. Windows
with and without one take turns within one job. The figure is the median over the pairs of the steps in a window with
a flood, divided by those in the window before it. The job must end with exit code 0 on both hosts.
"""

import collections
import contextlib
import json
import pathlib
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from absl import app, flags

from benchmarks.namespaces import HOSTS, process_on, two_hosts

_PAIRS = flags.DEFINE_integer("pairs", 6, "Windows with a flood, and as many without.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Length of a window.", lower_bound=1.0)
_RATE = flags.DEFINE_integer("rate", 2000, "Connections a minute.", lower_bound=1)
_JSON = flags.DEFINE_boolean("json", False, "Print the figures as JSON.")
_VISIT = flags.DEFINE_string("visit", None, "HOST:PORT: flood it while standard input says so; the benchmark's own.")

PORT = 2400
TRAIN = """
import pathlib, sys, time
import keras, numpy as np
from toolkit import strategies

strategy = strategies.create("multi_worker")
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64_000, 64)).astype("float32")
folder, times = pathlib.Path(sys.argv[1]), []

class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        times.append(time.time())
        if batch % 500 == 0:
            over = (folder / "over").exists()
            (folder / "steps").write_text("\\n".join(map(str, times)))
            self.model.stop_training = self.model.stop_training or over

model.fit(x, x[:, :1], batch_size=32, epochs=10_000, verbose=0, callbacks=[Steps()])
"""


def main(_: list[str]) -> None:
    """Prints each pair's steps and the median of their ratios."""
    if _VISIT.value:
        _flood(_VISIT.value, _RATE.value)
        return
    with two_hosts("1gbit") as names, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here = pathlib.Path(folder)
        (here / "train.py").write_text(TRAIN)
        command = ["toolkit", "launch", "--nodes=2", f"--rendezvous={HOSTS[0]}:{PORT}", "train.py", folder]
        secret = {"TOOLKIT_TOKEN": "one that nobody guesses"}
        job = [stack.enter_context(process_on(name, command, folder, **secret)) for name in names]
        stranger = stack.enter_context(
            process_on(names[1], ["benchmarks.flood", f"--visit={HOSTS[0]}:{PORT}", f"--rate={_RATE.value}"], None)
        )
        _until(lambda: len(_steps(here)) > 1000, job)
        windows = []
        for _pair in range(_PAIRS.value):
            for word in ("off", "on"):
                print(word, file=stranger.stdin, flush=True)
                begin = time.time()
                time.sleep(_SECONDS.value)
                windows.append((begin, time.time()))
        print("off", file=stranger.stdin, flush=True)
        _until(lambda: _steps(here)[-1] > windows[-1][1], job)
        steps = _steps(here)
        (here / "over").touch()
        said = [process.communicate(timeout=120)[0] for process in job]
        came = stranger.communicate(timeout=20)[0]
        if codes := [process.returncode for process in job if process.returncode]:
            raise SystemExit(f"the job ended with {codes}:\n" + "\n".join(each[-3000:] for each in said))
    counts = [sum(begin <= at < end for at in steps) / (end - begin) for begin, end in windows]
    ratios = [flooded / calm for calm, flooded in zip(counts[::2], counts[1::2], strict=True)]
    found = {"steps_per_second": counts, "ratios": ratios, "median": statistics.median(ratios), **json.loads(came)}
    if _JSON.value:
        print(json.dumps(found))
        return
    for calm, flooded, ratio in zip(counts[::2], counts[1::2], ratios, strict=True):
        print(f"{calm:7.0f} steps/s, {flooded:7.0f} with a flood: {ratio:.3f}")
    print(f"median {found['median']:.3f} of {len(ratios)} pairs; {found['connections']} connections, "
          f"{found['megabytes']:.0f} MB sent")  # fmt: skip


def _steps(folder: pathlib.Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):
        return [float(line) for line in (folder / "steps").read_text().split()]
    return []


def _until(holds: Callable[[], bool], job: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        ended = [process for process in job if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise SystemExit(
                "the job has no steps:\n" + "\n".join(process.communicate()[0][-3000:] for process in ended)
            )
        time.sleep(0.2)


def _flood(address: str, rate: int) -> None:
    """Connects while standard input says "on"; writes how often, and how much it has sent, when the input ends."""
    host, port = address.rsplit(":", 1)
    on, made, sent, turn = False, 0, 0, time.monotonic()
    kept: collections.deque[tuple[socket.socket, str]] = collections.deque()
    while True:
        if select.select([sys.stdin], [], [], 0.0 if on else 0.1)[0]:
            word = sys.stdin.readline().strip()
            if not word:
                break
            on, turn = word == "on", time.monotonic()
        if not on:
            continue
        with contextlib.suppress(OSError):
            visitor = socket.create_connection((host, int(port)), timeout=1)
            visitor.setblocking(False)
            kept.append((visitor, ("silent", "slow", "endless")[made % 3]))
        made += 1
        for _ in range(len(kept)):
            visitor, kind = kept.popleft()
            try:
                if kind != "silent":
                    sent += visitor.send(b"x" * (1 if kind == "slow" else 1 << 16))
                stays = bool(visitor.recv(4096))
            except BlockingIOError:
                stays = True
            except OSError:
                stays = False
            if not stays:  # The launcher has hung up.
                visitor.close()
                continue
            kept.append((visitor, kind))
        turn += 60.0 / rate
        time.sleep(max(0.0, turn - time.monotonic()))
    print(json.dumps({"connections": made, "megabytes": sent / 1e6}))


if __name__ == "__main__":
    app.run(main)
