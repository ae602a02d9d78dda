"""The parts of `benchmarks.one_gpu` that are no commands of the toolkit.

python -m benchmarks.one_gpu_cases CASE GPU|CPU
"""

import contextlib
import hashlib
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import toolkit
from toolkit.launch.agent.ports import HeldPorts


def found(**figures: Any) -> None:
    """Prints what `benchmarks.one_gpu` gathers."""
    print("FOUND", json.dumps(figures), flush=True)


def versions(place: str) -> None:
    """Which software and hardware this is, and whether a product and a convolution compute there."""
    subprocess.run(["nvidia-smi"], check=False) if place == "GPU" else None
    devices = _devices(place, 1)
    import keras
    import tensorflow as tf

    build = {name: str(value) for name, value in tf.sysconfig.get_build_info().items() if "version" in name}
    details = [tf.config.experimental.get_device_details(each) for each in tf.config.list_physical_devices("GPU")]
    began = time.perf_counter()
    with tf.device(devices[0]):
        product = float(tf.reduce_sum(tf.ones([512, 512]) @ tf.ones([512, 512])))
        convolved = tf.nn.conv2d(tf.ones([8, 32, 32, 16]), tf.ones([3, 3, 16, 16]), 1, "SAME")
        convolution = float(tf.reduce_sum(convolved))
    seconds = time.perf_counter() - began
    found(tensorflow=tf.__version__, keras=keras.__version__, python=sys.version.split()[0], build=build)
    found(details=str(details), product=product, convolution=convolution, device=convolved.device, seconds=seconds)


def numbers(place: str) -> None:
    """Losses and weights on two logical devices beside one device's, without TF32, and compiled by XLA."""
    devices = _devices(place, 2)
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    steps = 20 if place == "GPU" else 4
    for dtype, optimizer in (("float32", "sgd"), ("float32", "adam"), ("mixed_float16", "adam"), ("float32", "xla")):
        ways = {"plain": None, "mirrored": toolkit.strategies.create("mirrored", devices=devices)}
        if dtype == "float32" and optimizer == "adam":
            ways["sharded"] = toolkit.strategies.create("mirrored", devices=devices, optimizer_state="sharded")
        ended = {}
        for way, strategy in ways.items():
            ended[way] = _trained(
                strategy, dtype, "sgd" if optimizer == "xla" else optimizer, optimizer == "xla", steps
            )
        losses, weights, digest = ended["plain"]
        for way in list(ways)[1:]:
            apart = max(abs(a - b) / abs(b) for a, b in zip(ended[way][0], losses, strict=True))
            weight = max(float(abs(a - b).max()) for a, b in zip(ended[way][1], weights, strict=True))
            found(dtype=dtype, optimizer=optimizer, way=way, losses_apart=apart, weights_apart=weight)
        found(
            dtype=dtype, optimizer=optimizer, first=losses[0], last=losses[-1], digest=digest, of=ended["mirrored"][2]
        )


def _trained(strategy: Any, dtype: str, optimizer: str, jit: bool, steps: int) -> tuple[list[float], list, str]:
    import keras
    import numpy as np

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    random = np.random.default_rng(0)
    x = random.normal(size=(64 * steps, 32, 32, 3)).astype("float32")
    y = random.integers(0, 10, 64 * steps)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Conv2D(32, 3, 2, activation="relu")]
        layers += [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
        model = keras.Sequential([keras.Input((32, 32, 3)), *layers, keras.layers.Dense(10, dtype="float32")])
        rate = {"sgd": keras.optimizers.SGD(0.003), "adam": keras.optimizers.Adam(1e-4)}[optimizer]
        model.compile(rate, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    losses: list[float] = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    model.fit(x, y, batch_size=64, shuffle=False, callbacks=[noting], verbose=0)
    keras.config.set_dtype_policy("float32")
    return losses, model.get_weights(), _digest(model)


def speed(place: str, network: str, batch: str) -> None:
    """Examples per second of Keras's `fit`: plain, on one device by the toolkit, and on two logical ones, in turn.

    With `jit_compile="auto"`, as users have it, and without XLA; `compiled` says of which XLA compiled the steps.
    """
    devices = _devices(place, 2)
    import keras

    one = toolkit.strategies.create("one_device", devices=devices[:1])
    two = toolkit.strategies.create("mirrored", devices=devices)
    steps, rounds = (60, 3) if place == "GPU" else (3, 1)
    ways: list[tuple[str, bool | str]] = [
        ("float32", "auto"),
        ("float32", False),
        ("mixed_bfloat16", "auto"),
        ("mixed_bfloat16", False),
    ]
    for dtype, jit in [*ways, ("mixed_float16", "auto")]:
        keras.utils.clear_session()
        keras.config.set_dtype_policy(dtype)
        trainings, first, compiled = {}, {}, {}
        for way, strategy in (("plain", None), ("one", one), ("two", two)):
            model, train = _training(strategy, network, int(batch), jit)
            compiled[way] = bool(model.jit_compile)
            first[way] = round(train(3), 1)
            trainings[way] = train
        rates: dict[str, list[float]] = {way: [] for way in trainings}
        for _ in range(rounds):
            for way, train in trainings.items():
                rates[way].append(int(batch) * steps / train(steps))
        medians = {way: round(statistics.median(each)) for way, each in rates.items()}
        figures = {"compiled": compiled, "per_second": medians, "first_steps": first, "rounds": rounds}
        found(network=network, batch=batch, dtype=dtype, jit_compile=jit, **figures)


def _training(strategy: Any, network: str, batch: int, jit: bool | str) -> tuple[Any, Callable[[int], float]]:
    """Returns a model, and what trains it for so many steps on examples that are there already and says the seconds."""
    import keras
    import tensorflow as tf

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = importlib.import_module("benchmarks.predictions").network(network)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), loss, jit_compile=jit)
    given = model.inputs[0]
    shape = (batch, *given.shape[1:])
    x = tf.zeros(shape, given.dtype) if "int" in given.dtype else tf.random.stateless_normal(shape, (1, 2))
    data = tf.data.Dataset.from_tensors((x, tf.zeros([batch], tf.int32)))

    def train(steps: int) -> float:
        began = time.perf_counter()
        model.fit(data.repeat(steps), verbose=0)
        return time.perf_counter() - began

    return model, train


def memory(place: str, way: str) -> None:
    """How much of the card this process takes, in MiB, when it holds 256 MiB: by NVML and by TensorFlow."""
    before = _used() if place == "GPU" else 0
    amount: Any = way if way in ("growth", "all") else float(way) if "." in way else int(way)
    setup = toolkit.devices.configure(gpus=1, memory=amount, emulate="never" if place == "GPU" else "always")
    import tensorflow as tf

    with tf.device(setup.logical_devices[0]):
        kept = tf.ones([64, 1024, 1024]) + 1
    taken = _used() - before if place == "GPU" else None
    known = tf.config.experimental.get_memory_info("GPU:0") if place == "GPU" else None
    found(memory=way, taken_mib=taken, tensorflow=known, holds=float(kept[0, 0, 0]), said=str(setup))


def _used() -> int:
    from toolkit.devices import inventory

    return inventory.look()[1][0].memory_used_mib or 0


def overlap(place: str) -> None:
    """Two workers by TF_CONFIG on one card, by the ring: steps with and without the edges of `step.overlap`."""
    with HeldPorts() as held:
        workers = [f"127.0.0.1:{held.free()}" for _ in range(2)]
    processes = []
    for index in (0, 1):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(config)}
        processes.append(
            subprocess.Popen([sys.executable, "-m", __spec__.name, "worker", place, str(index)], env=environ)
        )
    codes = [process.wait(150) for process in processes]
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")


def worker(place: str, index: str) -> None:
    """One of two workers that share a card."""
    edges: Any = importlib.import_module("toolkit.strategies.step.overlap")
    toolkit.devices.configure(gpus=1, memory="growth", emulate="never" if place == "GPU" else "always")
    strategy = toolkit.strategies.create("multi_worker", communication="ring")
    import keras
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    network, batch, steps, rounds = ("vgg16", 256, 10, 3) if place == "GPU" else ("small_cnn", 16, 3, 1)
    trained, trainings, weights_first = {}, {}, edges.weights_first
    for way in ("edges", "none"):
        keras.utils.set_random_seed(1)
        edges.weights_first = weights_first if way == "edges" else lambda _: None
        trained[way], trainings[way] = _training(strategy, network, batch, jit=False)
        trainings[way](3)  # Which traces it.
    seconds: dict[str, list[float]] = {way: [] for way in trainings}
    for number in range(rounds):
        for way in list(trainings)[:: -1 if number % 2 else 1]:
            seconds[way].append(trainings[way](steps) / steps)
    digests = {way: _digest(model) for way, model in trained.items()}
    if index == "0":
        found(ms_per_step={way: [round(1e3 * each, 2) for each in times] for way, times in seconds.items()})
        ratios = [a / b for a, b in zip(seconds["edges"], seconds["none"], strict=True)]
        found(edges_over_none=statistics.median(ratios), pairs=rounds, digests=digests)


def nccl(place: str) -> None:
    """What two processes that share a card come to with NCCL, and what its RAS socket answers meanwhile."""
    if place == "CPU":
        found(skipped="NCCL needs a GPU")
        return
    with HeldPorts() as held:
        workers = [f"127.0.0.1:{held.free()}" for _ in range(2)]
    processes = []
    for index in (0, 1):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(config), "NCCL_DEBUG": "WARN"}
        command = [sys.executable, "-m", __spec__.name, "exchange", place, str(index)]
        processes.append(subprocess.Popen(command, env=environ))
    answers: set[str] = set()
    until = time.monotonic() + 50
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 28028), 1) as connection:
            connection.settimeout(2)
            connection.sendall(b"CLIENT PROTOCOL 2\nVERBOSE STATUS\n")
            while piece := connection.recv(65536):
                answers.add(piece.decode(errors="replace"))
        time.sleep(1)
    for process in processes:
        process.kill()
    found(codes=[process.wait() for process in processes], answers=sorted(answers)[:8])


def exchange(place: str, index: str) -> None:  # noqa: ARG001
    """One of two workers that sum a tensor by NCCL for half a minute."""
    toolkit.devices.configure(gpus=1, memory="growth", emulate="never")
    strategy = toolkit.strategies.create("multi_worker", communication="nccl")
    import tensorflow as tf

    @tf.function
    def total() -> Any:
        context = tf.distribute.get_replica_context
        return strategy.run(lambda: context().all_reduce("SUM", tf.ones([1 << 20])))

    until = time.monotonic() + 30
    while time.monotonic() < until:
        total()


def _digest(model: Any) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()[:16]


def _devices(place: str, count: int) -> tuple[str, ...]:
    """Configures so many logical devices: of one card, or of the CPU."""
    if place == "CPU":
        return toolkit.devices.configure(gpus=count, emulate="always").logical_devices
    memory = {"memory": 0.8, "split": count} if count > 1 else {}
    return toolkit.devices.configure(gpus=count, emulate="never", **memory).logical_devices


CASES = {each.__name__: each for each in (versions, numbers, speed, memory, overlap, worker, nccl, exchange)}

if __name__ == "__main__":
    CASES[sys.argv[1]](*sys.argv[2:])
