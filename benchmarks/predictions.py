"""What a plan predicts of a training step on this machine, beside what is measured: its time and its memory.

    python -m benchmarks.predictions [--networks=vgg16,vit] [--replicas=1] [--rounds=3] [--what=time,memory]

With --emulate=never on GPUs. With --recompute, activations are computed again in the backward pass; with
--weights=sharded, replicas keep weights, gradients and slots in shards.

Networks on which nothing was calibrated, each in its own process, with Adam, on random examples of a small size.
Time: devices are measured, then steps of Keras's `fit`, in turn; the median of the rounds' ratios. Memory:
TensorFlow's profiler tells what its allocator was asked for, and the allocator itself what it took for that; each the
most of six steps. Targets: 10 % either way for time; predicted memory no less than what is then used, nor 10 % more.
"""

import gc
import glob
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

import toolkit

BATCHES = {
    "vgg16": 32,
    "resnet50": 32,
    "mobilenet_v2": 32,
    "convnext_tiny": 16,
    "vit": 64,
    "text": 32,
    "lstm": 64,
    "alexnet": 64,
    "small_cnn": 64,
    "blocks": 32,
}
_NETWORKS = flags.DEFINE_list("networks", list(BATCHES), "Which of them.")
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices of this process.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Pairs for time.", lower_bound=1)
_RECOMPUTE = flags.DEFINE_boolean("recompute", False, "Compute activations again in the backward pass.")
_WEIGHTS = flags.DEFINE_enum("weights", "replicated", ["replicated", "sharded"], "As of `create`.")
_WHAT = flags.DEFINE_list("what", ["time", "memory"], "Of time and memory.")
_ALONE = flags.DEFINE_boolean("alone", False, "Of a process for one network, which this benchmark starts itself.")
_EMULATE = flags.DEFINE_enum("emulate", "always", ["always", "never"], "Without CPU devices in place of GPUs: never.")
_MEMORY_EVENTS = ("MemoryAllocation", "MemoryDeallocation")


def main() -> None:
    """Starts a process for each network and each figure, and prints a table's rows."""
    if _ALONE.value:
        _predict(_NETWORKS.value[0], _WHAT.value[0])
        return
    for name in _NETWORKS.value:
        for what in _WHAT.value:
            arguments = [f"--networks={name}", f"--what={what}", f"--replicas={_REPLICAS.value}"]
            arguments += ["--recompute"] if _RECOMPUTE.value else []
            arguments += [f"--emulate={_EMULATE.value}", f"--weights={_WEIGHTS.value}"]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.predictions", "--alone", *arguments, f"--rounds={_ROUNDS.value}"],
                # What has statistics on CPUs is the allocator that GPUs have.
                env={**os.environ, **({"TF_CPU_ALLOCATOR_USE_BFC": "true"} if what == "memory" else {})},
                stdout=subprocess.PIPE,
                text=True,
                timeout=1800,
                check=True,
            )
            row = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:14} {_REPLICAS.value} replicas: {row['said']}", flush=True)


def _predict(name: str, what: str) -> None:
    devices = toolkit.devices.configure(gpus=_REPLICAS.value, emulate=_EMULATE.value).logical_devices
    strategy = toolkit.strategies.create("auto", devices=devices, weights=_WEIGHTS.value)
    import keras
    import tensorflow as tf

    from toolkit import parallel

    keras.utils.set_random_seed(1)
    plain, batch = network(name), BATCHES[name]
    data = _data(plain.inputs[0], batch * _REPLICAS.value)
    setting = parallel.Setting(
        replicas=_REPLICAS.value,
        global_batch=batch * _REPLICAS.value,
        slots=2,
        recompute=_RECOMPUTE.value,
        weights=_WEIGHTS.value,
    )
    costs = parallel.costs(plain)

    def planned(machine: parallel.Machine) -> parallel.Plan:
        return parallel.choose(costs, machine, setting, conv="replicated", fc="replicated")

    any_machine = parallel.Machine(speed=1e12, inside=parallel.Link(bandwidth=1e10))

    def compiled() -> Any:
        keras.utils.clear_session()  # So that layers have the same names again.
        with strategy.scope():
            model = network(name)
            if _RECOMPUTE.value:
                model = parallel.parallelize(model, planned(any_machine))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
        return model

    if what == "time":
        (model := compiled()).fit(data, verbose=0)
        ratios = []
        for _ in range(_ROUNDS.value):
            machine = parallel.measure(
                plain, strategy, global_batch=batch * _REPLICAS.value, optimizer=keras.optimizers.Adam(), slots=2
            )
            meter = toolkit.training.StepTimer(warm_up=2)
            model.fit(data, epochs=2, verbose=0, callbacks=[meter])
            predicted = planned(machine).step.seconds
            ratios.append(predicted / (meter.seconds or 1))
        said = f"time predicted {1e3 * predicted:.0f} ms, measured {1e3 * (meter.seconds or 1):.0f}, "
        said += f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    else:
        predicted = planned(any_machine).step.memory
        del plain
        gc.collect()
        left = tf.config.experimental.get_memory_info(devices[0])["current"]  # TensorFlow keeps some graphs' weights.
        model = compiled()
        model.fit(data.take(1), verbose=0)
        gc.collect()
        before = tf.config.experimental.get_memory_info(devices[0])["current"]
        tf.config.experimental.reset_memory_stats(devices[0])
        requested = before + _requested(lambda: model.fit(data, verbose=0))
        taken = tf.config.experimental.get_memory_info(devices[0])["peak"]
        used, held = ((each - left) / _REPLICAS.value for each in (requested, taken))
        said = f"memory predicted {predicted / 1e6:.0f} MB, used {used / 1e6:.0f}, {predicted / used:.3f}; "
        said += f"the allocator took {held / 1e6:.0f}, {predicted / held:.3f}; before {(before - left) / 1e6:.0f}"
    print(json.dumps({"said": said}))


def _data(takes: Any, examples: int) -> Any:
    """Returns six steps' random examples, which take the memory of one."""
    import numpy as np
    import tensorflow as tf

    random, shape = np.random.default_rng(1), (examples, *takes.shape[1:])
    x = random.integers(0, 8000, shape) if "int" in takes.dtype else random.random(shape)
    return tf.data.Dataset.from_tensors((x.astype(takes.dtype), random.integers(0, 10, examples))).repeat(6)


def network(name: str) -> Any:
    """Returns a network without trained weights: one of Keras's, at 64 x 64 pixels, or of this toolkit's."""
    import keras

    if name == "text":
        return _text_transformer()
    if name == "blocks":
        return _text_of_blocks()
    if name == "lstm":
        recurrent = keras.layers.Bidirectional(keras.layers.LSTM(128, return_sequences=True))
        return keras.Sequential([keras.Input((128, 64)), recurrent, keras.layers.GRU(256), keras.layers.Dense(10)])
    classes = {"vgg16": "VGG16", "resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2", "convnext_tiny": "ConvNeXtTiny"}
    if name not in classes:
        return toolkit.models.build(name, classes=10)
    make = getattr(keras.applications, classes[name])
    return make(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)


def _text_transformer() -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(8000, 128)(inputs)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32, dropout=0.1)(y, y, use_causal_mask=True)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _text_of_blocks() -> Any:
    """Six of such blocks, each one's own layer."""
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
            self.attention = layers.MultiHeadAttention(4, 32, dropout=0.1)
            self.wide, self.narrow = layers.Dense(512, activation="gelu"), layers.Dense(128)

        def build(self, shape: tuple) -> None:
            for layer in (self.first, self.second, self.wide):
                layer.build(shape)
            self.attention.build(shape, shape)
            self.narrow.build((*shape[:-1], 512))
            self.built = True

        def call(self, x: Any) -> Any:
            y = self.first(x)
            x = x + self.attention(y, y, use_causal_mask=True)
            return x + self.narrow(self.wide(self.second(x)))

    inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(8000, 128)(inputs)
    for _ in range(6):
        x = Block()(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _requested(run: Any) -> float:
    """Returns the most bytes that are asked of the allocator at the same time, of those asked for while this runs."""
    import tensorflow as tf

    planes = importlib.import_module("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
        with tf.profiler.experimental.Profile(folder, options=options):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        with open(path, "rb") as file:
            space = planes.XSpace.FromString(file.read())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                kind = plane.event_metadata[event.metadata_id].name
                if kind in _MEMORY_EVENTS:
                    values = {plane.stat_metadata[each.metadata_id].name: each for each in event.stats}
                    address, size = (_number(values[key]) for key in ("addr", "requested_bytes"))
                    events.append((line.timestamp_ns * 1000 + event.offset_ps, kind, address, size))
    held = most = 0
    sizes: dict[int, int] = {}
    for _, kind, address, size in sorted(events):
        if kind == _MEMORY_EVENTS[0]:
            sizes[address] = size
            held += size
        else:  # Of what was there before, not what is asked for in its place.
            held -= sizes.pop(address, size)
        most = max(most, held)
    return most


def _number(stat: Any) -> int:
    return int(getattr(stat, stat.WhichOneof("value")))


if __name__ == "__main__":
    toolkit.cli.run(main)
