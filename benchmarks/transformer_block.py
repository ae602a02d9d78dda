"""Bytes that one sharded transformer block exchanges on two hosts, beside the count of Megatron-LM's paper.

    sudo python -m benchmarks.transformer_block [--rate=1gbit] [--rounds=3]

Two network namespaces stand for the hosts, with one core each. Models of one block and of three are trained, sharded
and replicated; a block's bytes and time are half of the difference, so that what a step exchanges besides doesn't
count. Shoeybi et al., arXiv 1909.08053, section 3: two all-reduces forward and two backward, of the activations of all
examples; each replica receives 2 (R-1)/R of their bytes for each.
"""

import json
import os
import pathlib
import statistics
import time

from absl import flags

from benchmarks.namespaces import measured_on, received, two_hosts

_RATE = flags.DEFINE_string("rate", "1gbit", "Of the link, as tc writes it.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds, each of all four models in turn.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", None, "Of a worker, which this benchmark starts itself.")
_WAY = flags.DEFINE_enum("way", "sharded", ["sharded", "replicated"], "Of a worker: how its blocks are divided.")
_BLOCKS = flags.DEFINE_integer("blocks", 1, "Of a worker: how many there are.")
_ADDRESSES = flags.DEFINE_list("addresses", [], "Of a worker: of both.")
_OUT = flags.DEFINE_string("out", None, "Of a worker: where its figures go.")
EXAMPLES, LENGTH, WIDTH, HEADS = 16, 64, 256, 4  # Examples of each replica.
STEPS, WARM, LIMIT = 12, 4, 200


def main() -> None:
    """Prints a line for each way."""
    if _RANK.value is not None:
        pathlib.Path(_OUT.value).write_text(json.dumps(worker()))
        return
    counted = 4 * 2 * (1 / 2) * (2 * EXAMPLES * LENGTH * WIDTH * 4)
    found: dict[str, list[dict]] = {"sharded": [], "replicated": []}
    module = "benchmarks.transformer_block"
    with two_hosts(_RATE.value) as names:
        for number in range(_ROUNDS.value):
            for way, rows in found.items():
                few, many = (
                    measured_on(names, module, [f"--way={way}", f"--blocks={blocks}"], port=2400 + number, limit=LIMIT)
                    for blocks in (1, 3)
                )
                rows.append({key: (many[key] - few[key]) / 2 for key in few})
    for way, rows in found.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        beside = f", {middle['bytes'] / counted:.3f} of the count" if way == "sharded" else ""
        print(
            f"{way}: a block takes {1000 * middle['seconds']:.1f} ms and {middle['bytes'] / 1e6:.3f} MB a step{beside}"
        )
    print(f"Medians of {_ROUNDS.value} rounds at {_RATE.value}; the paper's count is {counted / 1e6:.3f} MB")


def worker() -> dict:
    """Trains, and returns the seconds and bytes received of a step."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[_RANK.value % os.cpu_count()]})
    task = {"type": "worker", "index": _RANK.value}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": _ADDRESSES.value}, "task": task})
    import keras
    import numpy as np

    import toolkit

    devices = toolkit.devices.configure(gpus=1, emulate="auto")
    strategy = toolkit.strategies.create("multi_worker", devices=devices.logical_devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network(keras)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * EXAMPLES * (WARM + STEPS), LENGTH, WIDTH)).astype("float32")
    seen: list[tuple[float, int]] = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(now()))  # noqa: ARG005 - Keras's names.
    model.fit(x, x[:, 0, :1], batch_size=2 * EXAMPLES, epochs=1, verbose=0, shuffle=False, callbacks=[each])
    times = [later[0] - earlier[0] for earlier, later in zip(seen[WARM:], seen[WARM + 1 :], strict=False)]
    return {"seconds": statistics.median(times), "bytes": (seen[-1][1] - seen[WARM][1]) / len(times)}


def network(keras):
    """Returns blocks as in a vision transformer, their layers sharded or Keras's own."""
    from toolkit import parallel

    layers = keras.layers
    sharded = _WAY.value == "sharded"
    given = keras.Input((LENGTH, WIDTH))
    x = given
    for _ in range(_BLOCKS.value):
        y = layers.LayerNormalization()(x)
        kind = parallel.ShardedMultiHeadAttention if sharded else layers.MultiHeadAttention
        x = x + kind(HEADS, WIDTH // HEADS)(y, y)
        y = layers.LayerNormalization()(x)
        if sharded:
            y = parallel.ShardedDense(4 * WIDTH, activation="gelu", keep_split=True)(y)
            x = x + parallel.ShardedDense(WIDTH, split="inputs")(y)
        else:
            x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(y))
    return keras.Model(given, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def now() -> tuple[float, int]:
    """Returns the time, and the bytes received on all interfaces but loopback."""
    return time.perf_counter(), received()


if __name__ == "__main__":
    import toolkit

    toolkit.cli.run(main)
