"""The step that a thread is at: tf.distribute traces each replica in its own thread.

All that a part of a step may ask stands in one object, `this_step`, and nobody asks the strategy again. What a replica
is, `step/replicas.py` says when a strategy calls it. `this_step.having` sets something else, for a block.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

_NOBODY: Mapping[Any, Any] = MappingProxyType({})


class Step(threading.local):
    """What is true for a replica's step, in this thread. Outside of steps it is that of one replica.

    Which file sets what, in the order of a step (`tests/architecture` compares it with the code):

    - `strategies/pipelines.py`, where Keras's loop asks for data: iterator.
    - `strategies/fit/models.py`, where a script gives a batch: on_batch.
    - `strategies/step/replicas.py`, where a strategy calls one: all from strategy to on_cpus; rows, tables, divided.
    - `strategies/step/trial.py`, where the step is tried without values: recorded, inlines; noted.
    - `strategies/step/train_step.py`, where it is made: draws, xla, inlines, compiled_alone.
    - `strategies/step/share.py`, where it is given its share of the batch: share, piece.
    - `strategies/step/draws.py`, where a layer draws for some units: draws.
    - `strategies/step/view.py`, where it sees the whole batch: view, draws.
    - `strategies/step/xla.py`, where it is compiled in pieces: xla, piece.
    - `strategies/step/collectives.py`, where it exchanges nothing: is_local, count, place, members.
    - `strategies/fit/recompute.py`, where a layer is computed again in the backward pass: recomputes.
    - `strategies/step/optimizer.py`, where an optimizer is given gradients: summed, updates_own.
    - `strategies/step/accumulation.py`, where it adds them up: later, accumulates.
    - `strategies/step/sharded_optimizer.py`, where it has parts of variables: squares, parts, by_shard.
    - `strategies/step/sharded_weights.py`, where a layer reads such weights: waits.
    - `strategies/parameter_servers/worker_step.py`, where a worker makes the step: ps_step.
    - `strategies/parameter_servers/rounds.py`, where that is its share of a round's: tables, draws.
    - `strategies/parameter_servers/functions.py`, where it is one for workers: compiled_alone.
    - `strategies/parameter_servers/variables.py`, where variables have other values: ps_scopes.
    - `strategies/check/loops.py`, where a script's own loops are to be compared: loops.
    - `parallel/plan/trace.py`, where a plan looks at a model: planned.

    Attributes:
        strategy: The replica's strategy; None outside of a replica.
        options: The strategy's `Options`.
        replica: The replica's id.
        count: How many replicas exchange with one another; 1 if each trains by itself.
        place: This one's position among them.
        members: By `Among`, the ids of the replicas that exchange with this one, and its position in that list.
        groups: By `Among`, those ids for each replica.
        exchanges_overlap: Whether an exchange begins as soon as its own input is ready.
        shards_weights: Whether the replicas keep shards of weights that they use whole.
        graph: The graph in which the strategy calls the replica; None without one.
        gathers: Where such weights are gathered in that graph (`step/sharded_weights.py`); None where they aren't.
        on_cpus: Whether the replicas are CPU devices of one process, which stand in for GPUs.

        share: The replica's `Share` of the batch, in a step of `fit` or `evaluate`.
        rows: How many of a batch's examples a replica has, where what it was given may be a copy of one.
        tables: The numbers of the batch's components, flattened, that aren't by example and that all replicas have.
        divided: Whether a step's batch is a replica's share, read by Keras's loop.
        draws: How the replica draws random numbers for its rows (`step/draws.py`); None where that isn't by rows.
        compiled_alone: Whether XLA would compile the step on one device: its random numbers aren't the kernels'.
        view: The `View` of the whole batch, between the layers of a step that has one.
        recorded: The `Trial`, in a step on tensors without values.
        noted: Which tensors metrics have returned, by their ids.
        inlines: Whether a `tf.function` that is called is a part of the step.
        recomputes: Whether what is called is a part of what runs again in the backward pass.
        is_local: Whether the replica exchanges with none in this step.
        xla: How the step being traced uses XLA (`step/xla.py`); None if it doesn't.
        piece: What XLA is to compile, while that is traced.

        summed: Whether the gradients that an optimizer has in hand are those of all replicas.
        updates_own: Whether each replica updates its own copies of variables, so that they don't meet.
        later: Keys of the variables whose gradients are those of this replica still.
        accumulates: How an optimizer adds up gradients by replica, while it updates or is built.
        parts: The parts of variables that an optimizer updates.
        squares: The sums of squares of whole gradients, by which an optimizer clips.
        waits: What a gather waits for: the inputs of the layer that reads the weight.
        by_shard: Whether weights that steps use whole read as this replica's shards.

        iterator: The object by which Keras's loop is to read, while it asks for its data.
        on_batch: "train", "test" or "predict" while a script has a single batch trained on, tested or predicted.
        ps_step: The step of parameter servers that is traced.
        ps_scopes: The scopes in which their variables have other values.
        loops: Whether functions that the script calls are compared with one device's.
        planned: What a plan records of the layers that are called, while it looks at a model.
    """

    strategy: Any = None
    options: Any = None
    replica = place = 0
    count = 1
    members: Mapping[Any, tuple[list[int], int]] = _NOBODY
    groups: Mapping[Any, list[list[int]]] = _NOBODY
    exchanges_overlap = shards_weights = on_cpus = False
    graph: Any = None
    gathers: Any = None

    share: Any = None
    rows: Any = None
    tables: frozenset[int] = frozenset()
    divided = inlines = recomputes = is_local = compiled_alone = False
    draws: Any = None
    view: Any = None
    recorded: Any = None
    noted: Any = None
    xla: Any = None
    piece: Any = None

    summed = updates_own = False
    later: frozenset = frozenset()
    accumulates: Any = None
    parts: Any = None
    squares: Any = None
    by_shard = False
    waits: tuple = ()

    iterator: Any = None
    on_batch: str | None = None
    ps_step: Any = None
    ps_scopes: tuple = ()
    loops = False
    planned: Any = None

    @contextlib.contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """A context in which these attributes have these values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


this_step = Step()
