"""What workers run, traced on the chief: training steps, batches to evaluate, a batch to predict.

The chief can't add up what steps do to a metric whose state isn't a sum, such as a running maximum (`NotSums`). Each
step is sent the state that the one before has left, and none may be under way beside it. Which metrics these are shows
when a step is traced.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.parameter_servers.ledger import CAPACITY
from toolkit.strategies.parameter_servers.placement import CHIEF, SEED
from toolkit.strategies.parameter_servers.variables import LocalScope, Variables, changes, push
from toolkit.strategies.parameter_servers.worker_step import WorkerStep, tracing
from toolkit.strategies.step import xla
from toolkit.strategies.step.share import WholeShare, entered
from toolkit.strategies.step.train_step import inlining, results_noted, use_seeds
from toolkit.support.graphs import outside

# A function for a worker, how often one of its steps assigns each of `Variables.counters`, and the indices of those
# that it assigns in a branch.
Traced = tuple[Any, list[int], list[int]]


def training(
    variables: Variables, batch_of: Callable, *, signature: Sequence[Any], count: int, only: frozenset | None = None
) -> Traced:
    """Creates the function of `count` steps.

    Args:
        variables: The model's.
        batch_of: Takes a step's index in the dispatch, its batch's number (int64), and the dispatch's data.
        signature: The data's specs.
        count: The number of steps. They are unrolled: the condition of a `tf.while_loop` over variables on
            other tasks is sent to each of them in every turn, and a step then takes half as long again
            (3.6 against 2.5 ms, with 8 examples a step, 2 workers and 2 ps).
        only: Devices of the ps whose variables are to be updated; None for all.

    Returns:
        A function of (the first batch's number, the first step's number in the ledgers, the values of
        `variables.counters`, data), which returns (sums of the metrics, followed by what `branched` returns, the last
        step's logs).
    """
    model = variables.model
    assigned: list[int] = []
    conditional: list[int] = []

    def replica(first: tf.Tensor, ledger_step: tf.Tensor, counters: list, data: Any) -> tuple:
        starts = {}
        for device in variables.ledgers:
            with tf.device(device):
                starts[device] = tf.identity(ledger_step)
        sums = None
        logs: Any = {}
        before = counters
        for index in range(count):
            values, versions = variables.pull()
            scope = variables.scope(values, counters, sums)
            slots = {}
            for device, start in starts.items():
                with tf.device(device):
                    slots[device] = (start + index) % CAPACITY
            step = WorkerStep(variables, scope, versions, slots, only)
            step.send_from_cells()
            with (
                tracing(step, scope),
                whole_batch(variables),
                python_gradients() as of_python,
                reports_of(variables, "train") as reports,
            ):
                logs = reports(as_they_are(model.train_step(batch_of(index, first + index, data))))
            if of_python and not variables.in_turn:
                raise StrategyError(
                    asked="the gradient of a tf.py_function beside parameter servers",
                    found="TensorFlow keeps one call of it for that, and several workers train at the same time",
                    remedy="Give ParameterServerOptions(max_staleness=0), or write it with operations of TensorFlow's",
                )
            push(changes(variables, scope, only))
            counters = scope.tensors(variables.counters)
            sums = scope.tensors(variables.metrics)
        # The last step's result, as that of each step.
        assigned[:] = [scope.assigned.get(id(v), 0) for v in variables.counters]
        conditional[:] = conditional_in(scope, variables)
        return flattened([*scope.tensors(variables.metrics), *branched(conditional, before, counters)]), logs

    return trace(variables, replica, signature), assigned, conditional


def conditional_in(scope: LocalScope, variables: Variables) -> list[int]:
    """Returns the indices of `Variables.counters` that a step leaves at values which the chief can't compute."""
    told = scope.conditional | variables.told
    # The chief counts an optimizer's steps and what is drawn; anything else is the step's own.
    own = {key for key, times in scope.assigned.items() if times != scope.counted.get(key, 0)}
    own -= {id(v) for v in variables.counters if v.name == SEED}
    return [index for index, v in enumerate(variables.counters) if id(v) in told | own]


def branched(indices: Sequence[int], before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Returns for the chief the values of counters that a branch assigned, before and after."""
    return [values[index] for values in (before, after) for index in indices]


def build_optimizers(variables: Variables, batch_of: Callable, *, signature: Sequence[Any]) -> None:
    """Creates the variables of optimizers that a model's own `train_step` is the first to use."""

    def replica(first: tf.Tensor, _second: tf.Tensor, counters: list, data: Any) -> tf.Tensor:
        values, _ = variables.pull()
        scope = variables.scope(values, counters)
        with tracing(_BuildingStep(), scope):
            variables.model.train_step(batch_of(0, first, data))
        return first

    trace(variables, replica, signature)


class _BuildingStep:
    """A step that is traced but never run, so that optimizers create the variables that a step first uses.

    Keras makes those of the optimizer that a model was compiled with. The user's own `train_step` may keep others.
    """

    def apply_scaled(self, optimizer: Any, grads: list, variables: list) -> None:
        """As `apply`."""
        self.apply(None, optimizer, grads, variables)

    def apply(self, _original: Any, optimizer: Any, _grads: list, variables: list) -> None:
        """Creates an optimizer's variables beside those that it trains."""
        if optimizer.built:
            return
        strategy = tf.distribute.get_strategy()

        def build() -> None:
            with strategy.scope(), keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)

        outside(build)  # Variables that are created in the scopes of the step belong to the step.


def evaluation(variables: Variables, batch_of: Callable, *, signature: Sequence[Any]) -> tuple[Any, list[int]]:
    """Creates the function that evaluates batches, with one pull: of (the first's number, how many, counters, data).

    It returns what that of `training` does; of counters, those that are `Variables.told` alone. Beside it is returned
    how often a batch assigns each counter, as seeds that are drawn by.
    """
    model = variables.model
    assigned: list[int] = []
    told = [index for index, v in enumerate(variables.counters) if id(v) in variables.told]

    def replica(first: tf.Tensor, count: tf.Tensor, counters: list, data: Any) -> tuple:
        values, _ = variables.pull()
        start = [tf.zeros(v.shape, v.dtype) for v in variables.metrics], list(counters)
        logs: Any = {}

        def one(index: tf.Tensor, sums: list, counters: list) -> tuple:
            nonlocal logs
            scope = variables.scope(values, counters, sums)
            with scope, inlining(), whole_batch(variables), reports_of(variables, "test") as reports:
                logs = reports(as_they_are(model.test_step(batch_of(0, first + index, data))))
            assigned[:] = [scope.assigned.get(id(v), 0) for v in variables.counters]
            return index + 1, scope.tensors(variables.metrics), scope.tensors(variables.counters)

        if signature:  # One batch, sent along.
            _, sums, after = one(tf.constant(0, tf.int64), *start)
        else:
            zero = tf.constant(0, tf.int64)
            _, sums, after = tf.while_loop(lambda index, *_: index < count, one, [zero, *start], parallel_iterations=1)
        return flattened([*sums, *branched(told, counters, after)]), logs if signature else {}

    return trace(variables, replica, signature), assigned


def prediction(variables: Variables, whole: Callable, *, signature: Sequence[Any]) -> tuple[Any, list[int]]:
    """Creates the function that predicts the batch that `whole` makes of the tensors that are sent.

    Beside it is returned how often that assigns each counter.
    """
    model = variables.model
    assigned: list[int] = []

    def replica(_first: tf.Tensor, _count: tf.Tensor, counters: list, data: Any) -> Any:
        values, _ = variables.pull()
        scope = LocalScope([*variables.served, *variables.counters], [*values, *counters])
        with scope, inlining():
            outputs = model.predict_step(whole(data))
        assigned[:] = [scope.assigned.get(id(v), 0) for v in variables.counters]
        return outputs

    return trace(variables, replica, signature), assigned


def trace(variables: Variables, replica: Callable, signature: Sequence[Any]) -> Any:
    """Traces what a worker runs: a function of two int64 scalars, the values of `variables.counters`, and data.

    It is traced again where the step assigns variables in a branch, a loop or a function within it: those get cells.

    Args:
        variables: The model's.
        replica: The function.
        signature: The data's specs.
    """
    scalar = tf.TensorSpec([], tf.int64)
    counters = [tf.TensorSpec(v.shape, v.dtype) for v in variables.counters]
    return traced(variables, replica, [scalar, scalar, counters, list(signature)])


def traced(variables: Variables, function: Callable, signature: Sequence[Any]) -> Any:
    """Traces a function of a step, as `trace` does; the signature has all of its arguments."""
    strategy = variables.model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def run(*given: Any) -> Any:
        use_seeds(variables.seeds)
        alone = xla.compiled_alone(variables.model)
        with single_replica(strategy), this_step.having(compiled_alone=alone):
            return function(*given)

    while True:
        variables.without_cell.clear()
        concrete = tf.function(run, input_signature=signature).get_concrete_function()
        if not variables.without_cell:
            return concrete
        variables.celled |= variables.without_cell


@contextlib.contextmanager
def python_gradients() -> Iterator[list]:
    """A context in which gradients of Python functions are computed in the chief, where such functions run.

    TensorFlow leaves them on the worker, which knows none of the chief's functions. The context yields a list, to which
    it adds those that a step contains.
    """
    found: list[Any] = []

    def device(operation: Any) -> str:
        if operation.type != "EagerPyFunc" or operation.device:
            return operation.device
        found.append(operation)
        return CHIEF

    with tf.compat.v1.device(device):
        yield found


@contextlib.contextmanager
def single_replica(strategy: Any) -> Iterator[None]:
    """A context in which a function is traced as the only replica of a step.

    `strategy.run` would give the replica its own thread, and `merge_call`, in which updates are applied, would go
    back to the first thread. Keras's scopes are thread-local: a `StatelessScope` with the step's copies that is entered
    in the replica's thread isn't seen in the other.
    """
    with strategy.scope(), _SingleReplica(strategy, replica_id_in_sync_group=0):
        yield


class _SingleReplica(tf.distribute.ReplicaContext):
    """The context of a step's only replica: a reduction over all replicas returns its own value."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:  # noqa: ARG002
        return value


def flattened(values: Sequence[Any]) -> tf.Tensor:
    """Returns one tensor to fetch instead of many."""
    if not values:
        return tf.zeros([0], tf.float64)
    return tf.concat([tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values], 0)


@contextlib.contextmanager
def reports_of(variables: Variables, kind: str) -> Iterator[Callable]:
    """A context in which a step is traced; yields a function of its logs, which records whose results they report.

    A step of the user's may return a metric's result under another name than the metric's own. The function returns
    the logs in one dict.

    Args:
        variables: Whose `reported` is set.
        kind: "train" or "test".
    """
    with results_noted(variables.model) as noted:

        def reports(logs: Any) -> dict[str, Any]:
            flat = in_one_dict(logs)
            metrics = {id(metric): number for number, metric in enumerate(variables.model.metrics)}
            found = {name: noted[id(value)] for name, value in flat.items() if id(value) in noted}
            variables.reported[kind] = {name: (metrics[id(r.metric)], r.place) for name, r in found.items()}
            return flat

        yield reports


def as_they_are(logs: Any) -> Any:
    """Returns a step's logs with the values that variables among them have now, as an optimizer's learning rate."""
    return keras.tree.map_structure(lambda x: tf.convert_to_tensor(x) if isinstance(x, keras.Variable) else x, logs)


def in_one_dict(logs: Any) -> dict[str, Any]:
    """Returns a step's logs as Keras reports them: what a dict among them holds stands beside the others."""
    flat: dict[str, Any] = {}
    for name, value in logs.items() if isinstance(logs, dict) else ():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def fetched(outputs: Sequence[tuple]) -> list[tuple]:
    """Brings the results of step functions from the worker: sums of the metrics, and the last step's logs."""
    return [
        (sums.numpy(), keras.tree.map_structure(lambda x: x.numpy() if tf.is_tensor(x) else x, logs))
        for sums, logs in outputs
    ]


class NotSums(Exception):
    """Metrics whose state isn't a sum.

    Args:
        by_variable: By the ids of their variables, their names.
    """

    def __init__(self, by_variable: dict[int, str]) -> None:
        super().__init__(by_variable)
        self.by_variable = by_variable


@contextlib.contextmanager
def whole_batch(variables: Variables) -> Iterator[None]:
    """A context in which a step of a whole batch is traced.

    Raises:
        NotSums: At its end, where it has updated metrics whose state is no sum, and which aren't known for it.
    """
    found: list[Any] = []
    with entered(WholeShare(found.append)):
        yield
    new = {id(v): metric.name for metric in found for v in metric.variables if id(v) not in variables.told}
    if new:
        raise NotSums(new)


def check_in_turn(variables: Variables, names: Iterable[str]) -> None:
    """Checks that no two steps are under way at once if there are such metrics.

    Raises:
        StrategyError: There are, and several workers train at the same time.
    """
    first = next(iter(names), None)
    if first is not None and not variables.in_turn:
        raise StrategyError(
            asked=f"the metric {first} beside parameter servers",
            found="its state isn't a sum over examples, and several workers train at the same time",
            remedy="Give ParameterServerOptions(max_staleness=0), or make it of sums",
        )
