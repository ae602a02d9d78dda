"""Finds functions of a dataset that draw random numbers, such as `tf.image.random_flip_left_right` in a `map`.

They come from a state that all calls of the function share: in the order of the elements where it is called for one
after another, and in the order of threads where it is called for several at once. TensorFlow's datasets don't say in
public what they are made of; `tests/strategies/test_draws.py` says so when that changes.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from toolkit.strategies.input.components import without_options

__all__ = ["Draw", "draws_of", "in_the_order_of_threads", "other_in_each_process"]

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
