"""The context of a thread's current step, build or read: tf.distribute traces each replica in its own thread.

One object for all of it, `here`, so that a reader of a step can see what any of its parts may ask. `known` sets
something, for a block.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Step", "here", "known"]


@dataclasses.dataclass(frozen=True)
class Step:
    """What is true for one replica while a strategy runs a function; without values, it is that of one replica.

    Attributes:
        strategy: Its strategy.
        options: The strategy's `Options`.
        replica: This replica's id.
        count: How many replicas exchange with one another; 1 if each trains by itself.
        place: This one's position among them.
        members: By `Among`, the ids of the replicas that exchange with this one, and its position in that list.
        groups: By `Among`, those ids for each replica.
        exchanges_overlap: Whether an exchange begins as soon as its own input is ready.
        on_cpus: Whether the replicas are CPU devices of one process, which stand in for GPUs.
    """

    strategy: Any = None
    options: Any = None
    replica: int = 0
    count: int = 1
    place: int = 0
    members: Mapping[Any, tuple[list[int], int]] = dataclasses.field(default_factory=dict)
    groups: Mapping[Any, list[list[int]]] = dataclasses.field(default_factory=dict)
    exchanges_overlap: bool = False
    on_cpus: bool = False

    def alone(self) -> "Step":
        """Returns the step of a replica that exchanges with none."""
        return dataclasses.replace(self, count=1, place=0, members={})


class _Here(threading.local):
    """Attributes of this thread.

    Attributes:
        step: The replica's `Step`.
        alone: Whether the replica exchanges with none.
        view: The `View` of the whole batch, between the layers of a step that has one.
        share: The replica's `Share` of the batch, in a step of `fit` or `evaluate`.
        summed: Whether the gradients that an optimizer has in hand are those of all replicas.
        inlines: Whether a `tf.function` that is called is a part of the step.
        noted: Which tensors metrics have returned, by their ids.
        accumulates: How an optimizer adds up gradients by replica, while it updates or is built.
        later: Keys of the variables whose gradients are those of this replica still.
        parts: The parts of variables that an optimizer updates.
        squares: The sums of squares of whole gradients, by which an optimizer clips.
        recorded: The `Trial`, in a step on tensors without values.
        recomputes: Whether what is called is a part of what runs again in the backward pass.
        iterator: The object by which Keras's loop is to read, while it asks for its data.
        on_batch: "train", "test" or "predict" while a script has a single batch trained on, tested or predicted.
        divided: Whether a step's batch is a replica's share, read by Keras's loop.
        xla: How the step being traced uses XLA (`step/xla.py`); None if it doesn't.
        piece: What XLA is to compile, while that is traced.
        whole: The numbers of the batch's components, flattened, that aren't by example and that all replicas have.
        rows: How many of a batch's examples a replica has, where what it was given may be a copy of one.
        ps_step: The step of parameter servers that is traced.
        ps_scopes: The scopes in which their variables have other values.
    """

    alone = summed = inlines = recomputes = divided = False
    step = Step()
    view: Any = None
    share: Any = None
    noted: Any = None
    accumulates: Any = None
    later: frozenset = frozenset()
    parts: Any = None
    squares: Any = None
    recorded: Any = None
    iterator: Any = None
    on_batch: str | None = None
    rows: Any = None
    xla: Any = None
    piece: Any = None
    whole: frozenset = frozenset()
    ps_step: Any = None
    ps_scopes: tuple = ()


here = _Here()


@contextlib.contextmanager
def known(**values: Any) -> Iterator[None]:
    """Sets attributes of `here` for a block."""
    before = {name: getattr(here, name) for name in values}
    vars(here).update(values)
    try:
        yield
    finally:
        vars(here).update(before)
