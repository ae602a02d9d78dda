"""The datasets that a strategy is given: what they are made of, and what tf.data and Keras's loop do with them.

`by_example` tells which components of a batch have the examples along their first axis; all replicas get the others
whole. A scalar has none. A table such as `tf.ones((4, 6))` beside a batch is told by what the dataset is made of: a
function of `map` returns it without having computed it from its arguments, and its size isn't theirs.

`draws_of` finds functions that draw random numbers, such as `tf.image.random_flip_left_right` in a `map`. The numbers
come from a state that all calls of the function share: in the order of the elements where it is called for one after
another, and in the order of threads where it is called for several at once.

`untuned` is a dataset without tf.data's autotuning, which ends runs seconds late. `epoch_iterator` tells a strategy
which data Keras's loop is about to read.

TensorFlow's datasets don't say in public what they are made of, and Keras has no public hook for its loop's iterator:
`tests/strategies/test_components.py`, `test_draws.py` and `test_building.py` fail when that changes.
"""

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from toolkit.devices import cores
from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.support.graphs import computed_from

_cores = functools.cache(cores)
_BATCH = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset")
_MAP = ("_MapDataset", "_ParallelMapDataset")


def by_example(dataset: Any) -> list[bool]:
    """Returns for each of the flattened components whether its first axis counts examples."""
    dataset = without_options(dataset)
    kind, inputs = type(dataset).__name__, list(getattr(dataset, "_inputs", list)())
    leaves = tf.nest.flatten(dataset.element_spec)
    if kind == "_ZipDataset":
        return [each for part in inputs for each in by_example(part)]
    if kind in _MAP:
        return _of_function(dataset, inputs[0], leaves)
    if kind not in _BATCH and len(inputs) == 1 and inputs[0].element_spec == dataset.element_spec:
        return by_example(inputs[0])  # Such as `take` or `shuffle`.
    return _by_size(leaves)


def has_shape(leaf: Any) -> bool:
    """Returns whether a component, or its spec, is a tensor: Keras has an empty Optional in place of missing labels."""
    return hasattr(leaf, "shape")


def without_options(dataset: Any) -> Any:
    """Returns the dataset below those that don't change its elements."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return dataset


def _size(leaf: Any) -> int | None:
    return leaf.shape[0] if leaf.shape.rank else None


def _by_size(leaves: list) -> list[bool]:
    there = [leaf for leaf in leaves if has_shape(leaf) and leaf.shape.rank != 0]
    sizes = collections.Counter(map(_size, there))
    usual = None if None in sizes else max(sizes, key=sizes.__getitem__, default=None)
    return [has_shape(leaf) and leaf.shape.rank != 0 and _size(leaf) == usual for leaf in leaves]


def _of_function(dataset: Any, source: Any, leaves: list) -> list[bool]:
    given, graph = (
        zip(tf.nest.flatten(source.element_spec), by_example(source), strict=True),
        dataset._map_func.function.graph,
    )
    # A batch may be made from numbers, such as of its first example.
    arguments = {
        tensor.op: _size(spec)
        for tensor, (spec, examples) in zip(graph.inputs, given, strict=False)
        if examples or (has_shape(spec) and spec.shape.rank == 0)
    }

    def is_batch(leaf: Any, tensor: tf.Tensor) -> bool:
        if not has_shape(leaf) or leaf.shape.rank == 0:
            return False
        # A constant of the batch's own size may be weights: `tf.ones_like` of a known shape is one.
        return _size(leaf) in {None, *arguments.values()} or any(op in arguments for op in computed_from([tensor.op]))

    return [is_batch(leaf, tensor) for leaf, tensor in zip(leaves, graph.outputs, strict=True)]


# Operations that draw from their own or a generator's state, or that set a variable, as Keras's layers do.
_DRAWS = re.compile(
    r"(Random(Uniform(Int)?|StandardNormal|Shuffle(V2)?|Poisson(V2)?|Gamma)|TruncatedNormal|ParameterizedTruncatedNormal"
    r"|Multinomial|SampleDistortedBoundingBox(V2)?|Stateful(Uniform|UniformInt|UniformFullInt|StandardNormal(V2)?"
    r"|TruncatedNormal|RandomBinomial)|RngReadAndSkip|RngSkip|Assign(Add|Sub)?VariableOp)"
)
_SEVERAL = re.compile(r"_Parallel\w+")


class Draw(NamedTuple):
    """A function of a dataset that draws random numbers.

    Attributes:
        name: What it is called, such as "augment".
        parallel: Whether it is called for several elements at once.
    """

    name: str
    parallel: bool


def draws_of(dataset: Any) -> list[Draw]:
    """Returns the functions of a dataset and its inputs that draw random numbers."""
    return list(_draws(dataset)) if isinstance(dataset, tf.data.Dataset) else []


def other_in_each_process(draws: Iterable[Draw]) -> str:
    """Returns the warning about functions by which the processes' data differ; "" without one."""
    name = next((draw.name for draw in draws), "")
    return name and (
        f"{name} draws random numbers, in each worker others: the examples are the same, and what is drawn for them "
        "isn't one device's. Draw by an example's position where that matters"
    )


def in_the_order_of_threads(draws: Iterable[Draw]) -> str:
    """Returns the warning about random functions that are called for several elements at once; "" without one."""
    name = next((draw.name for draw in draws if draw.parallel), "")
    return name and (
        f"{name} draws random numbers for several examples at once, in the order of threads: no two runs draw the "
        "same, and a resumed run isn't exact. Draw by an example's position, data.repeat().enumerate().map(f) with a "
        "tf.random.stateless_* or tf.image.stateless_* of seed=(1, n) in f(n, example), and steps_per_epoch in fit; or "
        "leave num_parallel_calls out of that map"
    )


def _draws(dataset: Any) -> Iterator[Draw]:
    dataset = without_options(dataset)
    parallel = bool(_SEVERAL.match(type(dataset).__name__))
    for wrapper in getattr(dataset, "_functions", list)():
        graph = wrapper.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        function: Any = wrapper._func  # A Keras layer has a name, and no __name__.
        shuffles = str(getattr(function, "__module__", "")).startswith("keras.src.trainers")  # Arrays, for `fit`.
        if not shuffles and any(_DRAWS.fullmatch(node.op) for node in nodes):
            yield Draw(str(getattr(function, "__name__", getattr(function, "name", "a function"))), parallel)
    for source in getattr(dataset, "_inputs", list)():
        yield from _draws(source)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the same dataset without tf.data's autotuning, unless its own options ask for it.

    tf.data's tuning thread can sleep through the end of its iterator, which then waits for it: for as long as the
    iterator has lived, up to 60 s, at the end of every epoch, `fit` and `evaluate` (TensorFlow 2.21,
    Model::OptimizeLoop: it is woken before the flag it looks at is set). In its place AUTOTUNE means as many calls at
    a time as there are cores.
    """
    given = dataset.options().autotune
    options = tf.data.Options()
    options.autotune.enabled = bool(given.enabled)
    if not given.enabled and given.initial_parallelism is None:
        options.autotune.initial_parallelism = _cores()  # TensorFlow's own number is 16.
    return dataset.with_options(options)


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the same dataset with its elements in order, also if its options allow another: workers must agree."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


@contextlib.contextmanager
def input_devices_kept(strategy: tf.distribute.MirroredStrategy) -> Iterator[None]:
    """Restores what a dataset with InputReplicationMode.PER_REPLICA changes for all that are distributed after it.

    TensorFlow 2.21 keeps the mode on the strategy, and would ask for each replica's share in every replica's pipeline.
    """
    before = strategy.extended._input_workers_devices
    try:
        yield
    finally:
        strategy.extended._input_workers_devices = before


def untuned_for_device(original: Callable, *args: Any, **kwargs: Any) -> tf.data.Dataset:
    """Turns tf.data's autotuning off between a pipeline and a device.

    A distributed dataset's own options don't reach the small datasets that TensorFlow puts there: runs of several
    workers on one machine ended 7 s late 2 times of 6 with that tuning, and 0 times of 6 without. There is nothing to
    tune in these datasets, and no public way to say so.
    """
    return untuned(original(*args, **kwargs))


_TRAINS = "_toolkit_trains"


def whole_for_keras(distribute: Callable) -> Callable:
    """Decorates a strategy's method that distributes a dataset, so that `fit` may read one distributed by the user.

    Keras hands a dataset to the strategy itself, once it has put such as `class_weight` into it.
    """

    @functools.wraps(distribute)
    def wrapped(strategy: Any, dataset: Any, options: Any = None) -> Any:
        distributed = distribute(strategy, dataset, options)
        if epoch_iterator() is None and isinstance(dataset, tf.data.Dataset) and distributed is not dataset:
            distributed._toolkit_whole = dataset
        return distributed

    return wrapped


def announce(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Makes Keras's loop announce what it reads."""
    if "x" in kwargs:
        kwargs["x"] = getattr(kwargs["x"], "_toolkit_whole", kwargs["x"])
        if kwargs.get("class_weight") and isinstance(kwargs["x"], tf.distribute.DistributedDataset):
            raise StrategyError(
                asked="fit was given class_weight, and data of distribute_datasets_from_function",
                found="each replica's data come from a function, which class_weight can't be put into",
                remedy="Have the function's datasets hold (x, y, weight), or give fit a tf.data.Dataset",
            )
    vars(iterator)[_TRAINS] = "class_weight" in kwargs  # Keras passes everything by name, and this to train only.
    with this_step.having(iterator=iterator):
        original(iterator, *args, **kwargs)


def trains(iterator: Any) -> bool:
    """Returns whether Keras's loop reads by this object to train."""
    return getattr(iterator, _TRAINS, True)


def epoch_iterator() -> Any:
    """Returns the object through which Keras's loop is about to read, or None.

    Its `data_adapter.num_batches` is the data's length, None where that isn't known.
    """
    return this_step.iterator
