"""Bytes per step of each ps, and the step's time, by where variables live: two hosts at 1 Gbit/s.

    sudo python -m benchmarks.parameter_placement

Network namespaces stand for the hosts: chief, worker:0 and ps:0 on one, worker:1 and ps:1 on the
other. The network has 12.6 M parameters, 99 % of them in FC layers. Bytes are counted by the kernel
on each ps's own connections, those of its host's worker included. Rounds of all three in turn.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

import toolkit
from benchmarks.namespaces import HOSTS, two_hosts

_ROUNDS = flags.DEFINE_integer("rounds", 2, "Rounds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps measured.", lower_bound=2)
_RATE = flags.DEFINE_string("rate", "1gbit", "Of the link, as tc writes it.")
_WAYS = ("round_robin", "balanced", "sharded")
_WAY = flags.DEFINE_enum("way", "round_robin", list(_WAYS), "Set by this program for its tasks.")
_CLUSTER = {
    "chief": [f"{HOSTS[0]}:2220"],
    "worker": [f"{host}:2221" for host in HOSTS],
    "ps": [f"{host}:2222" for host in HOSTS],
}
_BATCH = 64


def main() -> None:
    """Prints a line for each placement: medians over the rounds."""
    if "TF_CONFIG" in os.environ:
        train(_WAY.value)
        return
    seen: dict[str, list] = {way: [] for way in _WAYS}
    with two_hosts(_RATE.value) as names, tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "cluster.json")
        file.write_text(json.dumps({"cluster": _CLUSTER}))
        for number in range(_ROUNDS.value):
            for way in _WAYS if number % 2 else reversed(_WAYS):
                seen[way].append(measure(names, file, way))
                print(f"round {number + 1}, {way}: {shown(seen[way][-1:])}", flush=True)
    for way in _WAYS:
        print(f"{way:12} {shown(seen[way])}")


def shown(measured: list) -> str:
    """Medians in words."""
    seconds = [each[0] for each in measured]
    loads = [statistics.median(each[1][ps] for each in measured) for ps in (0, 1)]
    return (
        f"{1000 * statistics.median(seconds):5.0f} ms/step ({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}), "
        f"MB per step: ps:0 {loads[0]:.1f}, ps:1 {loads[1]:.1f}"
    )


def measure(names: tuple[str, str], file: pathlib.Path, way: str) -> tuple[float, list[float]]:
    """Returns seconds per step, and megabytes per step of each ps."""
    command = [sys.executable, "-m", "toolkit", "launch", f"--cluster={file}", f"--log_dir={file.parent / 'logs'}"]
    flags_again = [f"--steps={_STEPS.value}", f"--way={way}"]
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, "-m", "benchmarks.parameter_placement", *flags_again],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        for name in names
    ]
    before: list[int] = []
    lines = []
    try:
        for line in running[0].stdout or ():
            lines.append(line)
            if "MEASURE begins" in line:
                before = [carried(name) for name in names]
            found = re.search(r"MEASURE ended ([0-9.]+)", line)
            if found:
                moved = [carried(name) - start for name, start in zip(names, before, strict=True)]
                return float(found[1]), [each / 1e6 / _STEPS.value for each in moved]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.communicate(timeout=60)
    raise RuntimeError("".join(lines[-20:]))


def carried(name: str) -> int:
    """Bytes that the ps in a namespace has sent and received.

    Workers fetch variables from its port; it fetches gradients from theirs.
    """
    command = ["ip", "netns", "exec", name, "ss", "-tinH", "sport = :2222 or dport = :2221"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    return sum(int(count) for count in re.findall(r"bytes_(?:acked|received):(\d+)", text))


def train(way: str) -> None:
    """In each task: fits, and says when it begins and ends."""
    options = toolkit.strategies.ParameterServerOptions(variables=way, steps_per_dispatch=1)
    strategy = toolkit.strategies.create("parameter_server", parameter_server=options)
    import keras
    import tensorflow as tf

    layers = keras.layers
    with strategy.scope():
        parts = [keras.Input((32, 32, 3))]
        for filters in (32, 64):
            parts += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
        parts += [layers.Flatten(), *(layers.Dense(2048, activation="relu") for _ in range(2)), layers.Dense(10)]
        model = keras.Sequential(parts)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )

    def batch(number, share, shares):  # noqa: ARG001 - no rounds here.
        seed = tf.stack([number, number])
        images = tf.random.stateless_uniform([_BATCH, 32, 32, 3], seed)
        return images, tf.random.stateless_uniform([_BATCH], seed, maxval=10, dtype=tf.int32)

    data = strategy.numbered(tf.data.Dataset.range(10**9).map(lambda number: batch(number, 0, 1)), batch)
    model.fit(data, steps_per_epoch=4, verbose=0)
    print("MEASURE begins", flush=True)
    time.sleep(1)
    began = time.perf_counter()
    model.fit(data, steps_per_epoch=_STEPS.value, verbose=0)
    seconds = (time.perf_counter() - began) / _STEPS.value
    time.sleep(0.5)
    print(f"MEASURE ended {seconds}", flush=True)
    time.sleep(5)


if __name__ == "__main__":
    toolkit.cli.run(main)
