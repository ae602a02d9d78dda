"""A step on tensors without values: what it creates, and whether a replica's rows are enough for it.

Nothing runs: gradients are zeros, optimizers only say what they are given, and whatever is assigned is forgotten. The
graph that is left shows which layers and losses the step calls and what it computes between them (see `rows`).

A replica's rows are enough for a step if each loss that it differentiates is a mean or a sum over rows, if each value
that it returns or gives to a metric is a mean or by row, and if what it assigns is the same for every part of the
batch. A layer of the user's is by row if each output is, if what it adds to the loss is a mean, and if it assigns
nothing that depends on rows; Keras's own layers are, but for some. A step or a layer that isn't by row is opened: it is
computed of the whole batch, and the layers that it calls of a replica's rows (see `view`).
"""

import bisect
import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.step.rows import ALIKE, OTHER, ROWS, Call, Graph, Rows
from toolkit.strategies.step.trusted import have_as_many_rows, is_by_row
from toolkit.strategies.upstream import private, replaced
from toolkit.support.graphs import outside

_TAPES = inspect.getfile(inspect.unwrap(tf.GradientTape.gradient))
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


@dataclasses.dataclass
class Reads:
    """How an opened step or layer uses a tensor, beside handing it to what is computed by row.

    Attributes:
        values: Whether it reads values.
        shape: Whether it reads the shape.
        differentiated: Whether a gradient by it is asked for, so that layers must be given what it is.
        by_row: Whether it has a row for each of the batch's; None if that isn't known.
        logits: The same of the logits that Keras keeps on it; None if that isn't known.
    """

    values: bool = True
    shape: bool = True
    differentiated: bool = False
    by_row: bool | None = None
    logits: "Reads | None" = None


class Trial:
    """What a step does.

    Attributes:
        optimizers: Each optimizer that was called, and its variables.
        calls: The layers and losses that the step calls itself.
        data: The tensors of its batch.
        opened: Whether it needs the whole batch.
        sums: Whether the losses that it differentiates are sums over rows, and not means.
        replicated: Whether gradients are asked for in a loop, as of a Jacobian: layers can't exchange anything there.
        logs: What the tensors are that it returns, by their numbers.
        by_example: By the numbers of the tensors that it returns, whether they have a row for each example.
        reads_gradients: Whether it does more with gradients than hand them to optimizers.

    Args:
        returns_rows: Whether each replica is to return its own rows of what the step returns.
    """

    def __init__(self, returns_rows: bool = False) -> None:
        self._returns_rows = returns_rows
        self.optimizers: list[tuple[Any, list]] = []
        self.calls: list[Call] = []
        self.data: list = []
        self.opened = False
        self.sums = self.replicated = False
        self.reads_gradients = False
        self._gradients: list[tf.Tensor] = []  # Of variables.
        self._sources: set[int] = set()
        self._read: set[int] = set()  # What is differentiated, which no operation shows here.
        self.logs: dict[int, Rows] = {}
        self.by_example: dict[int, bool] = {}
        self._graph: Any = None
        self._within: list[list[Call]] = [self.calls]
        self._targets: list[list] = []
        self._updates: list[list[list]] = [[]]  # Of the step, and of the calls that it is within: as `Call.updates`.
        self._assigned: dict[int, Any] = {}
        self._closed: list[tuple[int, int]] = []
        self._returned: dict[int, Any] = {}

    def follow(self, step: Callable, data: Any, noted: Callable[[], dict]) -> Any:
        """Calls a step, and finds out what it needs.

        Args:
            step: Takes the batch.
            data: The batch, of placeholders.
            noted: Returns the results of metrics, by the ids of their tensors.
        """
        self._graph = tf.compat.v1.get_default_graph()
        self.data = [each for each in keras.tree.flatten(data) if tf.is_tensor(each)]
        scope = private.global_state.get_global_attribute("stateless_scope")
        scope.collect_losses = True
        logs = step(data)
        results = noted()
        leaves = dict(enumerate(keras.tree.flatten(logs)))
        self._returned = {n: each for n, each in leaves.items() if tf.is_tensor(each) and id(each) not in results}
        self.by_example = {number: is_row_dimension(each) for number, each in self._returned.items()}
        self._assigned = dict(scope.state_mapping)
        kept = {id(each) for each in (*self._returned.values(), *self._assigned.values())}
        self.reads_gradients = any(each.consumers() or id(each) in kept for each in self._gradients)
        return logs

    def decide(self, *, own: bool, metrics: Iterable[Any]) -> None:
        """Finds out which parts of the step need the whole batch.

        Args:
            own: Whether code of the user's is in the step itself.
            metrics: The variables of metrics, which count what they are given.
        """
        for each in metrics:
            self._assigned.pop(id(each), None)
        inner = [self._opens(each) for each in self.calls]
        by_row = not any(inner)
        if by_row and own:
            by_row = self._is_by_row()
        self.opened = not by_row
        if self.opened:
            self._closed = sorted(_closed(self.calls))

    def _is_by_row(self) -> bool:
        # Nothing is known of what a sparse tensor consists of, but that layers take its rows.
        sparse = [each for each in self.data if isinstance(each, tf.SparseTensor)]
        parts = {id(part): OTHER for each in sparse for part in tf.nest.flatten(each, expand_composites=True)}
        found = Graph(self._graph, {**parts, **{id(each): ROWS for each in sparse}}, self.calls)
        if not all(each.is_alike for each in found.branches):  # Replicas might take different ones.
            return False
        targets = [each for target in self._targets for each in target]
        scalars = [found[each] for each in targets if each.shape.rank == 0]
        if not all(found[each].by_row for each in targets if each.shape.rank != 0):
            return False
        self.sums = bool(scalars) and all(each.is_sum for each in scalars)
        if not self.sums and not all(each.is_mean for each in scalars):
            return False
        self.logs = {number: found[x] for number, x in self._returned.items()}
        if not all(self._may_be_returned(each) for each in self.logs.values()) or not _add_up(found, self._updates[0]):
            return False
        return self._assigns_alike(found, self.calls, 0, len(self._graph.get_operations()))

    def _may_be_returned(self, found: Rows) -> bool:
        parts = found.is_alike if self._returns_rows else found.is_mean or found.is_sum
        return parts or found.in_order

    def _assigns_alike(self, found: Graph, inner: list[Call], first: int, last: int) -> bool:
        """Whether variables are set to what is the same for every part of the batch."""
        if not all(value.is_alike for _, value in found.assigned):
            return False
        places = {op: number for number, op in enumerate(self._graph.get_operations())}
        for value in self._assigned.values():
            place = places.get(value.op, -1) if hasattr(value, "op") else -1
            own = first <= place < last and not any(each.first <= place < each.last for each in inner)
            if own and not found[value].is_alike:
                return False
        return True

    def _opens(self, call: Call) -> bool:
        """Whether the call of a layer, a loss or a reduction, or one within it, needs the whole batch."""
        is_layer = isinstance(call.of, keras.layers.Layer)
        if is_layer and is_by_row(call.of, call.inputs):
            return False  # Whatever it calls, such as a cell with states of a size that was written out.
        inner = [self._opens(each) for each in call.calls]
        call.opened = any(inner) or (self._mixes(call) if is_layer else not have_as_many_rows(call.inputs))
        return call.opened

    def _mixes(self, call: Call) -> bool:
        given = {id(each): ROWS if is_row_dimension(each) else ALIKE for each in call.inputs}
        found = Graph(self._graph, given, call.calls, (call.first, call.last), call.inputs)
        if any(not found[each].is_mean for each in call.losses):
            return True
        if not _add_up(found, call.updates):
            return True
        if not all(found[each].in_order or found[each].is_alike for each in call.outputs):
            return True
        return not self._assigns_alike(found, call.calls, call.first, call.last)

    def reads(self, tensor: Any) -> Reads:
        """Returns how opened parts of the step use a tensor."""
        if isinstance(tensor, tf.SparseTensor):
            parts = tf.nest.flatten(tensor, expand_composites=True)
            reading = [op for part in parts for op in part.consumers() if not self._is_closed(op)]
            return Reads(values=bool(reading), shape=bool(reading))
        if not isinstance(tensor, tf.Tensor):
            return Reads(differentiated=True)
        logits = logits_of(tensor)
        found = Reads(by_row=is_row_dimension(tensor), logits=None if logits is None else self.reads(logits))
        if self.replicated or id(tensor) in self._sources:
            return dataclasses.replace(found, differentiated=True)
        returned = not self._returns_rows and any(each is tensor for each in self._returned.values())
        if returned or id(tensor) in self._read:
            return found
        reading = [op for op in tensor.consumers() if not self._is_closed(op)]
        return dataclasses.replace(found, values=any(op.type not in _SHAPES for op in reading), shape=bool(reading))

    def _is_closed(self, op: tf.Operation) -> bool:
        if not hasattr(self, "_places"):
            self._places = {each: number for number, each in enumerate(self._graph.get_operations())}
        place = self._places[op]
        before = bisect.bisect_right(self._closed, (place, 1 << 60)) - 1
        return before >= 0 and place < self._closed[before][1]

    # While the step is followed.

    def call(self, of: Any, inputs: Any, function: Callable[[], Any], gives: Callable | None = None) -> Any:
        """Calls a function, and records its operations as one.

        Args:
            of: What is called.
            inputs: What it is given, in any structure.
            function: Takes nothing.
            gives: As of `Call`.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:  # In a branch, a loop or a function in the step.
            return function()
        call = Call(self._number(), of=of, gives=gives, inputs=_tensors(inputs))
        self._within[-1].append(call)
        self._within.append(call.calls)
        self._updates.append(call.updates)
        try:
            outputs = function()
            if getattr(of, "stateful", False) and is_by_row(of, call.inputs):  # By its states it has one size.
                outputs = keras.tree.map_structure(of_any_size, outputs)
        finally:
            self._within.pop()
            self._updates.pop()
        call.last = self._number()
        call.outputs = _tensors(outputs)
        logits = [logits_of(each) for each in call.outputs]
        call.outputs += [each for each in logits if isinstance(each, tf.Tensor)]
        if isinstance(of, keras.layers.Layer):
            call.losses = _tensors(of._get_own_losses())
        return outputs

    def _number(self) -> int:
        return len(self._graph.get_operations())

    def update(self, given: Any) -> None:
        """Records what a metric is given."""
        self._updates[-1].append(_tensors(given))

    def gradient(self, target: Any, sources: Any) -> Any:
        """Returns zeros in the place of gradients."""
        targets = _tensors(target)
        if len(self._within) == 1:
            self._targets.append(targets)
            self._sources |= {id(each) for each in _tensors(sources)}
        self._read |= {id(each) for each in targets}
        self.replicated = self.replicated or of_a_jacobian() or tf.compat.v1.get_default_graph() is not self._graph

        def of_rows(given: list[Rows], _: Any) -> Rows:
            *of, source = given
            return source if source.by_row and all(each.by_row or each.is_sum for each in of) else OTHER

        def one(source: Any) -> Any:
            if tf.is_symbolic_tensor(source):
                return self.call("gradient", [*targets, source], lambda: tf.zeros_like(source), of_rows)
            # A variable of several replicas has no handle here, and one that isn't created yet has none at all.
            zeros = tf.zeros(source.shape, source.dtype)
            self._gradients.append(zeros)
            return zeros

        return tf.nest.map_structure(one, sources)


def _add_up(found: Graph, updates: list[list]) -> bool:
    """Whether metrics that replicas update with their rows, or with means of them, are the whole batch's together."""
    each = [(x, found[x]) for given in updates for x in given]
    return all(known.is_mean if x.shape.rank == 0 else known.by_row or known.is_alike for x, known in each)


def of_any_size(x: Any) -> Any:
    """Returns a tensor whose number of rows isn't known when it is traced."""
    sized = isinstance(x, tf.Tensor) and x.shape.rank and x.shape[0] is not None
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]]) if sized else x


def batch_of_any_size(data: Any, whole: Any = ()) -> Any:
    """Returns a batch's tensors with a number of rows that isn't known when they are traced."""
    if tf.executing_eagerly():
        return data
    leaves = [x if number in whole else of_any_size(x) for number, x in enumerate(tf.nest.flatten(data))]
    return tf.nest.pack_sequence_as(data, leaves)


def of_a_jacobian() -> bool:
    """Returns whether TensorFlow's own file asks for a gradient, as for a row of a Jacobian."""
    asking: Any = sys._getframe(1)
    while asking is not None and asking.f_globals.get("__name__", "").startswith("toolkit."):
        asking = asking.f_back
    return asking is not None and asking.f_code.co_filename == _TAPES


def logits_of(probabilities: Any) -> Any:
    """Returns what Keras's losses read in place of a softmax's or a sigmoid's result; None if it isn't such a one."""
    return getattr(probabilities, "_keras_logits", None)


def _tensors(given: Any) -> list:
    return [each for each in keras.tree.flatten(given) if tf.is_tensor(each)]


def _closed(calls: list[Call]) -> Iterator[tuple[int, int]]:
    for each in calls:
        if each.opened:
            yield from _closed(each.calls)
        elif isinstance(each.of, (keras.layers.Layer, keras.losses.Loss)):
            yield each.first, each.last


def is_row_dimension(x: Any) -> bool:
    """Returns whether a tensor's first axis may count the rows of a batch: its size isn't known when it is traced."""
    return tf.is_tensor(x) and bool(x.shape.rank) and x.shape[0] is None


def calling(of: Any, inputs: Any, function: Callable[[], Any], gives: Callable | None = None) -> Any:
    """Calls a function; in a trial its operations count as one (see `Trial.call`)."""
    return function() if this_step.recorded is None else this_step.recorded.call(of, inputs, function, gives)


def run(step: Callable, data: Any, noted: Callable[[], dict] = dict, returns_rows: bool = False) -> Trial:
    """Runs a step without values; its variables are created when it has ended.

    Args:
        step: A `train_step`, `test_step` or `predict_step`.
        data: What it takes: whatever has shapes and dtypes, with a first axis of any size.
        noted: As of `Trial.follow`.
        returns_rows: As of `Trial`.

    Raises:
        Whatever the step raises.
    """

    def symbolic(leaf: Any) -> Any:
        if leaf is None:
            return None
        sparse = isinstance(leaf, (tf.SparseTensor, tf.SparseTensorSpec))
        return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype), sparse=sparse)

    given = keras.tree.map_structure(symbolic, data, none_is_leaf=True)
    replaced.APPLY.answer(trial=_note_optimizer)
    replaced.GRADIENT.answer(trial=_note_gradient)
    replaced.LAYER.answer(trial=_note_layer)
    trial = Trial(returns_rows)
    with this_step.having(recorded=trial, inlines=True):
        private.compute_output_spec(lambda data: trial.follow(step, data, noted), given)
    return trial


def _note_optimizer(_: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:  # noqa: ARG001
    this_step.recorded.optimizers.append((optimizer, list(trainable_variables or [])))


def _note_gradient(_: Callable, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return this_step.recorded.gradient(target, sources)


def _note_layer(further: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return this_step.recorded.call(layer, (args, kwargs), lambda: further(layer, *args, **kwargs))


# Which tensors of a step are results of metrics: a step may return them under its own names, and beside others.


_VARIABLES = (tf.Variable, keras.Variable, tf.distribute.DistributedValues)


class Result(NamedTuple):
    """A tensor that a metric's `result` returned, and its position in the result."""

    tensor: Any
    metric: keras.Metric
    place: int


@contextlib.contextmanager
def results_noted(model: Any) -> Iterator[dict[int, Result]]:
    """A context in which a replica records which tensors are results of a model's metrics, by the tensors' ids.

    A train_step may return them under its own names, and beside others.
    """
    noted: dict[int, Result] = {}
    metrics = [metric for metric in model.metrics if isinstance(metric, keras.Metric)]
    for metric in metrics:
        kept = vars(metric)  # Avoids Keras's actions when an attribute is set.
        kept["_toolkit_steps"] = kept.get("_toolkit_steps", 0) + 1  # Of replicas, which take turns.
        kept.setdefault("result", functools.partial(_noting, metric))
    try:
        with this_step.having(noted=noted):
            yield noted
    finally:
        for metric in metrics:
            kept = vars(metric)
            kept["_toolkit_steps"] -= 1
            if not kept["_toolkit_steps"]:
                del kept["_toolkit_steps"]
                if getattr(kept["result"], "func", None) is _noting:  # And not a metric's own attribute.
                    del kept["result"]


def _noting(metric: keras.Metric) -> Any:
    value = keras.tree.map_structure(
        lambda x: tf.convert_to_tensor(x) if isinstance(x, _VARIABLES) else x, type(metric).result(metric)
    )
    if this_step.noted is not None:
        this_step.noted |= {
            id(leaf): Result(leaf, metric, place) for place, leaf in enumerate(keras.tree.flatten(value))
        }
    return value


# Whether replicas' rows are enough for a model's step, found out once for each kind of data.


_LOG = logging.getLogger(__name__)
_STEPS = ("train_step", "test_step", "predict_step")
_METHODS = ("compute_loss", "compute_metrics")  # Of a model, which Keras's own steps call.


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of a step.

    Attributes:
        opened: Whether it needs the whole batch.
        trial: How it was found out; None if the step can't be traced without values, or need not be.
        sums: Whether the losses that it differentiates are sums over examples, and not means.
        logs: What the tensors are that it returns, by their numbers.
        by_example: By the numbers of the tensors that it returns, whether they have a row for each example.
        reads_gradients: Whether it may do more with gradients than hand them to optimizers.
    """

    opened: bool
    trial: Trial | None = None
    sums: bool = False
    logs: dict[int, Rows] = dataclasses.field(default_factory=dict)
    by_example: dict[int, bool] = dataclasses.field(default_factory=dict)
    reads_gradients: bool = True


class Tries:
    """What is known of one step of a model's, by the kind of its data.

    Args:
        model: It keeps what is found until its step function is made once more.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._found: dict[str, Found] = {}
        self._lock = threading.Lock()

    def of(self, step: Callable, data: Any, *, returns_rows: bool = False) -> Found:
        """Returns what is known of a step with such data, as `shown` does; the number of examples doesn't count."""
        with self._lock:
            table = this_step.tables
            tensors = [(path, each) for path, each in keras.tree.flatten_with_path(data) if tf.is_tensor(each)]
            kinds = [(path, each.dtype.name, each.shape[1:] if each.shape.rank else None) for path, each in tensors]
            key = str((kinds, sorted(table)))
            if key not in self._found:
                self._found[key] = outside(lambda: shown(self._model, step, data, table, returns_rows))
            return self._found[key]


def shown(model: keras.Model, step: Callable, data: Any, whole: Collection[int], returns_rows: bool = False) -> Found:
    """Finds out what a step needs, outside of its replicas.

    Args:
        model: Built.
        step: Its `train_step`, `test_step` or `predict_step`.
        data: A replica's part of a batch.
        whole: The numbers of its components that aren't by example.
        returns_rows: Whether each replica returns its own rows of what the step returns, as `predict` does.
    """
    kind = type(model)
    function = getattr(step, "__func__", None)
    own = function not in [getattr(keras.Model, each) for each in _STEPS]
    own = own or any(getattr(kind, each) is not getattr(keras.Model, each) for each in _METHODS)
    if not own and is_by_row(model):
        return Found(opened=False, reads_gradients=False)
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves):  # Padding depends on the longest row of the batch.
        return Found(opened=True)
    try:
        with model.distribute_strategy.scope(), results_noted(model) as noted:
            trial = run(step, _any_size(data, whole), lambda: noted, returns_rows)
        trial.decide(own=own, metrics=model.metrics_variables)
    except Exception:  # The user's own code may raise anything on tensors without values.
        _LOG.debug("%s can't be run on tensors without values", step, exc_info=True)
        return Found(opened=True)
    return Found(trial.opened, trial, trial.sums, trial.logs, trial.by_example, trial.reads_gradients)


def _any_size(data: Any, whole: Collection[int]) -> Any:
    def one(number: int, leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or not leaf.shape.rank or number in whole:
            return leaf
        kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
        return kind([None, *leaf.shape[1:]], leaf.dtype)

    leaves = [one(number, leaf) for number, leaf in enumerate(tf.nest.flatten(data))]
    return tf.nest.pack_sequence_as(data, leaves)
