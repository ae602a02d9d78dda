"""What our strategies do for the steps of Keras's loop: each replica knows its step, and results are the batch's.

A replica's `Step` is made once for a strategy and its options. What a step or `predict` returns of which each replica
has the same is marked by `alike`: Keras's loop, which would take a mean of it or join it, is given the first replica's.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.batches import Part
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among, mesh_of
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import meeting, processes
from toolkit.strategies.step.collectives import communication_of, overlaps_exchanges
from toolkit.strategies.step.gathers import Gathers
from toolkit.strategies.upstream.wrapping import attach

autograph = tf.__internal__.autograph
_FACTS = "_toolkit_facts"
_alike: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id: tensors can't be hashed.


def alike(tensor: tf.Tensor) -> tf.Tensor:
    """Marks a tensor of which each replica has the same, and returns it."""
    _alike[id(tensor)] = tensor
    return tensor


def _are_alike(values: Any) -> bool:
    return all(_alike.get(id(value)) is value for value in values)


def know_steps(strategy: tf.distribute.Strategy) -> None:
    """Makes replicas know their step, and update their own copies of variables. Later calls do nothing."""
    attach(strategy.extended, call_for_each_replica=_with_steps, _use_merge_call=_meets)


def _with_steps(original: Callable, extended: Any, fn: Callable, args: Any = (), kwargs: Any = None) -> Any:
    def of_one(*args: Any, **kwargs: Any) -> Any:
        facts = _facts_of(tf.distribute.get_replica_context())
        with this_step.having(**facts, **_facts_of_graph(shards_weights=facts["shards_weights"])):
            return fn(*args, **kwargs)

    return original(extended, of_one, args, kwargs)


def _meets(original: Callable, extended: Any) -> bool:
    """Returns whether TensorFlow synchronises all replicas when a variable changes."""
    return not this_step.updates_own and bool(original(extended))


def _facts_of(context: tf.distribute.ReplicaContext) -> dict[str, Any]:
    """Returns what is true for a replica in each of its steps: attributes of `this_step`."""
    strategy = context.strategy
    options, kept = options_of(strategy), vars(strategy).get(_FACTS)
    if kept is None or kept[0] is not options:
        kept = vars(strategy)[_FACTS] = options, {}
    replica = int(tf.get_static_value(context.replica_id_in_sync_group))
    if replica not in kept[1]:
        kept[1][replica] = _find_facts(strategy, options, replica)
    return kept[1][replica]


def _facts_of_graph(*, shards_weights: bool) -> dict[str, Any]:
    """Returns what is true for a replica in the graph that is being traced: attributes of `this_step`."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or not shards_weights:
        return {"graph": graph, "gathers": None}
    strategy = tf.distribute.get_strategy()
    in_one_process = isinstance(strategy, tf.distribute.MirroredStrategy)
    return {
        "graph": graph,
        "gathers": Gathers(graph, keeps=not in_one_process and communication_of(strategy) == "nccl"),
    }


def _find_facts(strategy: tf.distribute.Strategy, options: Any, replica: int) -> dict[str, Any]:
    mesh = mesh_of(strategy)
    count = mesh.shards * mesh.groups
    if count == 1:
        replica = 0
    groups = {among: [mesh.members(each, among) for each in range(count)] for among in Among if count > 1}
    in_one_process = isinstance(strategy, tf.distribute.MirroredStrategy)
    return {
        "strategy": strategy,
        "options": options,
        "replica": replica,
        "count": count,
        "place": replica,
        "members": {among: (each[replica], each[replica].index(replica)) for among, each in groups.items()},
        "groups": groups,
        "exchanges_overlap": count > 1 and overlaps_exchanges(strategy),
        "shards_weights": options.weights == "sharded" and mesh.shards > 1,
        "on_cpus": in_one_process and "CPU" in strategy.extended.worker_devices[0],
    }


class ReducesForKeras:
    """A mixin in front of TensorFlow's strategies."""

    made_by_toolkit = True
    experimental_local_results: Any

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; in a step of `fit` it is one, for one device's numbers."""
        return super().num_replicas_in_sync if this_step.share is None else 1  # type: ignore[misc]

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        """Runs a function on each replica, as TensorFlow does, with what Keras's loop has read for it."""
        if not tf.executing_eagerly():
            _note_run(self)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._run_traced(fn)(args, kwargs or {}, options)
        # Here, since AutoGraph doesn't look into `run_own`.
        fn = autograph.tf_convert(fn, autograph.control_status_ctx(), convert_by_default=False)
        divided = any(isinstance(leaf, (Part, tf.distribute.DistributedValues)) for leaf in _parts_and_leaves(args))

        def run_own(*args: Any, **kwargs: Any) -> Any:
            part = next((each for each in args if isinstance(each, Part)), Part(None, None, {}))
            # A step that finds no more data is to change nothing: a count would rise on the replicas that are quick.
            leaves = tf.nest.flatten(part.batch, expand_composites=True)
            has_data = tf.control_dependencies([each for each in leaves if tf.is_tensor(each)])
            with has_data, this_step.having(divided=divided, rows=part.rows, tables=frozenset(map(int, part.tables))):
                return fn(*(each.batch if isinstance(each, Part) else each for each in args), **kwargs)

        return _of_one(super().run(run_own, args, kwargs, options), self)  # type: ignore[misc]

    def _run_traced(self, fn: Any) -> Callable:
        """Returns a traced function that runs a traced one's Python function: replicas meet in no inner function."""
        functions = vars(self).setdefault("_toolkit_traced", weakref.WeakKeyDictionary())
        if fn not in functions:
            python, itself = fn.python_function, weakref.proxy(self)

            @tf.function
            def run_all(args: tuple, kwargs: dict, options: Any) -> Any:
                return itself.run(python, args, kwargs, options)

            functions[fn] = run_all
        return functions[fn]

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces what TensorFlow reduces, and scalars along an axis.

        Of a step's logs Keras asks the mean along axis 0 of scalars (keras-team/keras#20585). Nothing else may be
        touched: metrics' variables are reduced through this method too.
        """
        if isinstance(value, (tuple, list, dict)):
            return tf.nest.map_structure(lambda leaf: self.reduce(reduce_op, leaf, axis), value)
        parts = self.experimental_local_results(value)
        if _are_alike(parts):
            return parts[0]
        if axis is not None and all(part.shape.rank == 0 for part in parts):
            axis = None
        together = processes(self) > 1 and tf.executing_eagerly()
        with meeting(self) if together else contextlib.nullcontext():
            return super().reduce(reduce_op, value, axis)  # type: ignore[misc]


def _note_run(strategy: Any) -> None:
    """Notes in the graphs that are being traced that a step is run on replicas."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graph._toolkit_strategy = strategy
        graph = getattr(graph, "outer_graph", None)


def _parts_and_leaves(args: tuple) -> Iterator[Any]:
    for each in args:
        yield from [each] if isinstance(each, Part) else tf.nest.flatten(each)


def _of_one(values: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns what `run` returned, with one tensor for scalars that all replicas have alike."""

    def one(value: Any) -> Any:
        parts = strategy.experimental_local_results(value)
        return parts[0] if _are_alike(parts) else value

    return keras.tree.map_structure(one, values)
