"""What workers are sent: steps of training, batches to evaluate, a batch to predict."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.ledger import CAPACITY
from toolkit.strategies.parameter_servers.local import Copies
from toolkit.strategies.parameter_servers.step import Step, active, changes, push
from toolkit.strategies.parameter_servers.tracing import Traced, flat, numbers, trace
from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["evaluation", "prediction", "training"]


def training(
    variables: Variables, batches: Callable, *, signature: Sequence[Any], count: int, only: frozenset | None = None
) -> Traced:
    """Makes the function of `count` steps.

    Args:
        variables: Of the model.
        batches: Takes the number of a step in the dispatch, its number in the training (int64), and
            the dispatch's data; returns a batch.
        signature: Of the data.
        count: Steps.
        only: Devices of ps whose variables are to be updated; None for all.

    Returns:
        A function of (the first step's number in the training, the same by which the ledgers
        count, the values of `variables.counting`, data), which returns (sums of the metrics, the last
        step's logs).
    """
    model = variables.model
    assigned: list[int] = []

    def replica(first: tf.Tensor, place: tf.Tensor, counting: list, data: Any) -> tuple:
        places = {}
        for device in variables.ledgers:
            with tf.device(device):
                places[device] = tf.identity(place)
        sums = [tf.zeros(v.shape, v.dtype) for v in variables.metrics]
        logs: Any = {}
        for number in range(count):
            values, versions = variables.pull()
            copies = Copies([*variables.held, *variables.counting, *variables.metrics], [*values, *counting, *sums])
            here = {}
            for device, start in places.items():
                with tf.device(device):
                    here[device] = (start + number) % CAPACITY
            step = Step(variables, copies, versions, here, only)
            active.step = step
            try:
                with copies:
                    logs = model.train_step(batches(number, first + number, data))
            finally:
                active.step = None
            push(changes(variables, copies, values, only))
            counting = [copies.values[id(v)] for v in variables.counting]
            sums = [copies.values[id(v)] for v in variables.metrics]
        assigned[:] = [copies.assigned.get(id(v), 0) for v in variables.counting]  # By the last step, as by each.
        return flat(sums), numbers(logs)

    return trace(variables, replica, signature, assigned)


def evaluation(variables: Variables, batches: Callable, *, signature: Sequence[Any]) -> Traced:
    """Makes the function that evaluates some batches, with one pull; as `training`, with the count for the place."""
    model = variables.model

    def replica(first: tf.Tensor, count: tf.Tensor, counting: list, data: Any) -> tuple:
        values, _ = variables.pull()
        start = [tf.zeros(v.shape, v.dtype) for v in variables.metrics]
        logs: Any = {}

        def one(number: tf.Tensor, sums: list) -> tuple:
            nonlocal logs
            copies = Copies([*variables.held, *variables.counting, *variables.metrics], [*values, *counting, *sums])
            with copies:
                logs = model.test_step(batches(0, first + number, data))
            return number + 1, [copies.values[id(v)] for v in variables.metrics]

        if signature:  # One batch, sent along.
            sums = one(tf.constant(0, tf.int64), start)[1]
            return flat(sums), numbers(logs)
        _, sums = tf.while_loop(
            lambda number, _: number < count, one, [tf.constant(0, tf.int64), start], parallel_iterations=1
        )
        return flat(sums), {}

    return trace(variables, replica, signature)


def prediction(variables: Variables, whole: Callable, *, signature: Sequence[Any]) -> Traced:
    """Makes the function that predicts a batch.

    Args:
        variables: Of the model.
        whole: Takes the tensors of the batch; returns it as Keras has it.
        signature: Of the tensors.
    """
    model = variables.model

    def replica(_first: tf.Tensor, _place: tf.Tensor, counting: list, data: Any) -> Any:
        values, _ = variables.pull()
        with Copies([*variables.held, *variables.counting], [*values, *counting]):
            return model.predict_step(whole(data))

    return trace(variables, replica, signature)
