"""Measures how fast these devices compute a model's layers, and how fast replicas exchange through their strategy.

All replicas do the same at the same time, so that what they share (cores, memory, a network) counts as it will in
training. Each figure is the median of a few runs after a first one, but for what messages wait, which is their mean;
several processes agree on the slowest's.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.parallel.graph import copy_model
from toolkit.parallel.layers.kinds import plain_layer
from toolkit.parallel.plan.count import costs_seen
from toolkit.parallel.plan.step_cost import Link, Machine
from toolkit.parallel.plan.trace import Call, size_of, trace
from toolkit.strategies import mesh
from toolkit.strategies.context import this_step
from toolkit.strategies.fit.adapt import adapt_replicas
from toolkit.strategies.mesh import Layout
from toolkit.strategies.options import options_of
from toolkit.strategies.processes import agreement
from toolkit.strategies.step import collectives
from toolkit.strategies.step.exchanges import reduced
from toolkit.strategies.step.optimizer import exchange_gradients
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable

_RUNS = 5
_EXCHANGED = 4 << 20  # Bytes of each replica's tensor for measuring bandwidth.
_MESSAGE = 64 << 10  # Bytes of each replica's tensor for measuring latency.
_TURNS, _WIDTH = 10, 512  # How often replicas compute and exchange in turn; the size of the multiplied matrices.
_UPDATED = 4 << 20  # Elements of each replica's weights that are updated to measure the optimizer.
_MOST_REDUCED = 16 << 20  # The most elements of gradients that are summed.


def measure(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    global_batch: int,
    optimizer: Any = None,
    slots: int = 1,
    length: int | None = None,
) -> Machine:
    """Measures devices and the network between them. With several processes, all must call it.

    Args:
        model: A built Keras model of any kind. A copy of it is run.
        strategy: The strategy under which it is to train: mirrored, multi_worker, or one device.
        global_batch: Examples of all replicas together in a step.
        optimizer: A Keras optimizer like the one to be used; None for SGD with momentum.
        slots: Elements that it keeps for each element of a weight.
        length: As for `costs`.

    Returns:
        A machine with the seconds of each layer, for as many replicas as the strategy has: its one link stands
        for whatever is between them.

    Raises:
        ModelError: The model isn't built, or can't be taken apart.
    """
    batch = max(1, global_batch // strategy.num_replicas_in_sync)
    given = trace(model, length=length)
    layers = costs_seen(given)
    clock = _Clock(strategy)
    with strategy.scope(), mesh.in_one_group(strategy):
        copy = copy_model(model, _layer_that_exchanges_nothing)
        # The minimum: on a busy machine, the median of so short a time may be too large.
        empty = clock.seconds(lambda: tf.constant(0.0), min)
        seen = trace(copy, length=length)
        arguments = _like(seen.calls(copy)[0], seen.examples, batch)
        whole = max(clock.seconds(_training(copy, arguments, inputs_too=False)) - empty, 1e-9)
        # The model may have another name now.
        instances = {name: made for (name, _), (_, made) in zip(given.layers, seen.layers, strict=True)}
        each = {}
        for layer in layers:
            instance = instances[layer.name]
            calls = seen.calls(instance)
            # The measurement of a layer that is divided up would include all layers within it.
            if layer.forward == 0 or seen.is_divided(instance) or any(size_of(x) is None for x in calls[0].inputs):
                each[layer.name] = 0.0
                continue
            arguments = _like(calls[0], seen.examples, batch)
            took = clock.seconds(_training(instance, arguments, inputs_too=layer.passes_gradient))
            each[layer.name] = len(calls) * max(took - empty, 0.0)
        memory = _memory(clock, optimizer or keras.optimizers.SGD(0.01, momentum=0.9), slots, empty)
        sizes = [layer.parameters for layer in layers if layer.parameters]
        link = _link(clock, sizes, empty)
    scale = whole / max(sum(each.values()), 1e-12) / batch
    devices = strategy.extended.worker_devices if strategy.num_replicas_in_sync > 1 else ("",)
    return Machine(
        name="measured here",
        speed=sum(layer.operations or 0 for layer in layers) / (whole / batch),
        memory=memory,
        inside=link,
        seconds={name: seconds * scale for name, seconds in each.items()},
        fixed=empty,
        sharing=1 if any("GPU" in each for each in devices) else len(devices),
    )


class _Clock:
    """Runs a function on all replicas at once, and measures its time."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy

    def seconds(self, function: Callable[[], tf.Tensor], middle: Callable = statistics.median) -> float:
        @tf.function
        def on_all_replicas() -> Any:
            return self.strategy.run(function)

        took = []
        for _ in range(1 + _RUNS):
            began = time.perf_counter()
            for value in self.strategy.experimental_local_results(on_all_replicas()):
                value.numpy()
            took.append(time.perf_counter() - began)
        # Also where processes wait for one another, so that the next measurement begins at the same time.
        _, slowest = agreement.extremes(self.strategy, np.array([middle(took[1:])]))
        return float(slowest[0])


def _layer_that_exchanges_nothing(layer: Any) -> Any:
    config = layer.get_config()
    if config.get("synchronized"):
        return layer.__class__.from_config({**config, "synchronized": False})
    return plain_layer(layer)


def _like(call: Call, examples: int, batch: int) -> tuple:
    """Returns (arguments, keyword arguments) like those of an observed call, with `batch` examples for `examples`."""

    def like(value: Any) -> Any:
        if not isinstance(value, tf.Tensor):
            return value
        shape = [batch if size == examples and not place else size for place, size in enumerate(value.shape)]
        if value.dtype.is_floating:
            return tf.cast(tf.random.uniform(shape), value.dtype)
        return tf.ones(shape, value.dtype) if value.dtype == tf.bool else tf.zeros(shape, value.dtype)

    return keras.tree.map_structure(like, call.given)


def _training(layer: Any, arguments: tuple, *, inputs_too: bool) -> Callable:
    """Returns a step: a layer's call, then the gradients of its weights and, with `inputs_too`, of its inputs."""

    def run() -> tf.Tensor:
        given = [tf.identity(each) if isinstance(each, tf.Tensor) else each for each in keras.tree.flatten(arguments)]
        args, kwargs = keras.tree.pack_sequence_as(arguments, given)
        watched = [weight.value for weight in layer.trainable_variables]
        if inputs_too:
            watched += [each for each in given if isinstance(each, tf.Tensor) and each.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = layer(*args, **{**kwargs, "training": True})
        found = [g for g in tape.gradient(outputs, watched) if g is not None] if watched else []
        return _read([*found, *keras.tree.flatten(outputs)])

    return run


def _read(tensors: Sequence) -> tf.Tensor:
    """Returns the sum of one element of each tensor, each at a place that isn't known when the function is traced.

    TensorFlow leaves away whatever nobody reads, and computes no more than the known place of what is read there.
    """
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    places = [tf.random.uniform([], maxval=tf.size(tensor), dtype=tf.int32) for tensor in flat]
    return tf.add_n([tf.cast(tensor[place], tf.float32) for tensor, place in zip(flat, places, strict=True)])


def _memory(clock: _Clock, optimizer: Any, slots: int, empty: float) -> float:
    """Returns the bytes per second, as `Machine.memory` defines them, of an update of weights that aren't exchanged."""
    count = mesh.replica_count(clock.strategy)
    fresh = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.01})
    if count > 1:
        adapt_replicas()
        variable = ReplicaShardedVariable("zeros", [count * _UPDATED], layout=Layout(axis=0), name="weights")
    else:
        variable = keras.Variable("zeros", [_UPDATED], name="weights")
    exchange_gradients(fresh)
    fresh.build([variable])

    def update() -> tf.Tensor:
        fresh.apply_gradients([(tf.ones([_UPDATED]), variable)])
        with tf.control_dependencies([fresh.iterations.value]):
            return tf.constant(0.0)

    took = max(clock.seconds(update) - empty, 1e-6)
    return _UPDATED * 4 * (3 + 2 * slots) / took


def _link(clock: _Clock, sizes: Sequence[int], empty: float) -> Link:
    """Measures a small and a large exchange, by a gather and by an all-reduce of this many elements of gradients."""
    count = mesh.replica_count(clock.strategy)
    if count == 1:
        return Link(bandwidth=float("inf"))

    def gathered(size: int) -> Callable[[], tf.Tensor]:
        sent = [tf.random.uniform([size // 4]) for _ in range(count)]
        return lambda: _read([collectives.all_gather(sent[this_step.place], among=mesh.Among.ALL)])

    def in_turn(size: int) -> Callable[[], tf.Tensor]:
        matrix, sent = tf.random.uniform([_WIDTH, _WIDTH]), tf.random.uniform([size // 4])

        def run() -> tf.Tensor:
            x = tf.constant(0.0)
            for _ in range(_TURNS):
                x = 1e-9 * tf.reduce_max(tf.matmul(matrix + x, matrix))
                if size:
                    x = collectives.all_gather(sent + x, among=mesh.Among.ALL)[0, 0]
            return x

        return run

    def summed(sizes: Sequence[int]) -> Callable[[], tf.Tensor]:
        sent = [[tf.random.uniform([size]) for size in sizes] for _ in range(count)]
        return lambda: _read(reduced(sent[this_step.place], [None] * len(sizes)))

    short = max(clock.seconds(gathered(1024)) - empty, 0.0)
    long = max(clock.seconds(gathered(_EXCHANGED)) - empty, short + 1e-9)
    bandwidth = (count - 1) * _EXCHANGED / (long - short)
    # Messages wait longer while replicas compute, as in training, and some of them much longer.
    computing, both = (clock.seconds(in_turn(size), statistics.fmean) / _TURNS for size in (0, _MESSAGE))
    waiting = both - computing - (count - 1) * _MESSAGE / bandwidth
    share = min(1.0, _MOST_REDUCED / max(sum(sizes), 1))
    sizes = [max(1, round(share * size)) for size in sizes] or [1]
    few = max(clock.seconds(summed([1024])) - empty, 0.0)
    many = max(clock.seconds(summed(sizes)) - empty, few + 1e-9)
    sent = sum(sizes) * tf.as_dtype(options_of(clock.strategy).gradients.dtype).size
    return Link(
        bandwidth=bandwidth,
        latency=max(short, waiting),
        reducing=2 * (count - 1) / count * sent / (many - few),
        smallest=few,
    )
