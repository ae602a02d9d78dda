"""Gradients of all replicas, as `tf.GradientTape.gradient` returns them in the user's own step in `fit`.

What a `train_step` does with gradients before `optimizer.apply` it does with those of the whole batch: clips them by a
norm, adds noise, adds them up, or goes up their slope for a moment. Replica r's are multiplied by its share w_r and
summed, and every replica has the same.

    local gradient g_r  ->  * w_r  ->  all-reduce: y = sum over r of w_r * g_r

Where another tape records, y has a gradient: of upstream gradients u_r, of losses that are weighted at the end, what
replica s hands back is sum over r of w_r * u_r, so the exchange is its own gradient.

Left on their replica are gradients of tensors, as in a penalty; what is differentiated inside of another `gradient`, as
where activations are computed again; and those made in a branch, a loop (as of a Jacobian) or a function in a step,
where replicas can't meet or each example has its own: `optimizer.apply` exchanges them, as it does all that come from
no tape. There, what has been exchanged already is told by the graph (`provenance_of`), never by a mark: a script may
have added to it what only one replica knows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.step.exchanges import reduced
from toolkit.strategies.step.sharded_weights import handed_on, of_shards
from toolkit.strategies.step.share import Share, exchanged_in_graph
from toolkit.strategies.step.trial import of_a_jacobian
from toolkit.strategies.upstream import private
from toolkit.support.graphs import computed_from


@contextlib.contextmanager
def _differentiating(share: Share, scaled: bool) -> Iterator[None]:
    before = share.in_loss, share.differentiates
    share.in_loss, share.differentiates = scaled, True
    try:
        yield
    finally:
        share.in_loss, share.differentiates = before


def gradient(
    original: Callable, tape: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
) -> Any:
    """Returns gradients of all replicas; of a vector of losses they are added, while those of a mean are averaged."""
    share = this_step.share
    if this_step.shards_weights:
        original = functools.partial(of_shards, original)
    if share is None:
        if tf.distribute.in_cross_replica_context():  # What is read there is the first copy.
            sources = tf.nest.map_structure(_first_copy, sources)
        return original(tape, target, sources, output_gradients, **kwargs)

    def seed(each: Any) -> tf.Tensor:
        ones = tf.ones_like(each)
        if each.shape.rank == 0 and not share.sums:
            return ones
        return tf.math.divide_no_nan(ones, tf.cast(share.weight, ones.dtype))

    vectors = share.sums or any(getattr(each, "shape", None) for each in tf.nest.flatten(target))
    flat = tf.nest.flatten(sources)
    variables = {number: each for number, each in enumerate(flat) if _is_variable(each)}
    if vectors and output_gradients is None and len(variables) == len(flat):
        output_gradients = tf.nest.map_structure(seed, target)
    jacobian = (share.at_tape or this_step.view is not None) and of_a_jacobian()
    if jacobian and this_step.view is not None and not this_step.view.replicated:
        raise StrategyError(
            asked="the step computes a Jacobian",
            found="it can't be traced without values, and its layers can't exchange rows in the loop of a Jacobian",
            remedy="Compute the Jacobian in a layer's call, or its products by tape.gradient",
        )
    within, scaled = share.differentiates or jacobian, _is_of(target, share.scaled)
    with _differentiating(share, scaled):
        found = original(tape, target, sources, output_gradients, **kwargs)
    out = tf.nest.flatten(found)
    wanted = [number for number in variables if out[number] is not None]
    if wanted and share.at_tape and not within and this_step.piece is not None:
        this_step.piece.refuse()  # For example in a layer that changes its weights by their gradients.
    if not wanted or within or not share.at_tape or share.in_branch or this_step.count == 1:
        if share.has_gradients is not None:
            share.has_gradients(tf.nest.flatten([out[number] for number in wanted], expand_composites=True))
        return found
    totals = _exchanged([out[n] for n in wanted], [variables[n] for n in wanted], scaled)
    if this_step.shards_weights:
        totals = handed_on(totals, [variables[n] for n in wanted], whole=share.reads_gradients)
    for number, total in zip(wanted, totals, strict=True):
        out[number] = total
    share.in_graph.add(totals, [variables[number] for number in wanted])
    return tf.nest.pack_sequence_as(sources, out)


def _first_copy(source: Any) -> Any:
    held = getattr(source, "_value", source)  # Of a Keras variable.
    if not isinstance(held, tf.distribute.DistributedValues):
        return source
    return tf.distribute.get_strategy().experimental_local_results(held)[0]


def _exchanged(gradients: list, variables: Sequence, scaled: bool) -> list:
    """Returns the sums of all replicas; they have a gradient if another tape records."""
    every = frozenset(range(len(gradients))) if scaled else frozenset()
    if not gradients or not private.could_possibly_record():
        return reduced(gradients, variables, weighted=every)
    share = this_step.share
    assert share is not None

    @tf.custom_gradient
    def all_of_them(*tensors: tf.Tensor) -> tuple:
        def back(*upstream: tf.Tensor) -> list:
            # The weight must count once: for what was differentiated here, or at the end if that isn't the loss.
            totals = reduced(list(upstream), variables, weighted=every if share.in_loss else frozenset())
            weight = {0: 1.0, 1: share.weight, -1: 1 / share.weight}[share.in_loss - scaled]
            return [each * tf.cast(weight, each.dtype) for each in totals]

        return reduced(list(tensors), variables, weighted=every), back

    totals = all_of_them(*(tf.convert_to_tensor(each) for each in gradients))
    return list(totals) if isinstance(totals, (list, tuple)) else [totals]


def _is_of(target: Any, losses: list[tf.Tensor]) -> bool:
    """Returns whether the target is one of these losses, or was computed from one."""
    targets = [each for each in tf.nest.flatten(target) if tf.is_tensor(each)]
    if not losses or any(each is loss for each in targets for loss in losses):
        return bool(losses)
    if tf.executing_eagerly():
        return False
    made = {loss.op for loss in losses}
    return any(each in made for each in computed_from([each.op for each in targets], made))


def _is_variable(each: Any) -> bool:
    return isinstance(each, (tf.Variable, keras.Variable)) or hasattr(each, "handle")


def batch_gradients(gradients: Sequence, variables: Sequence) -> list:
    """Returns the sums of all replicas' gradients in the user's own loop; see `strategies.batch_gradients`."""
    grads, count = list(gradients), this_step.count
    if count == 1 or this_step.share is not None:  # In `fit`, a tape has exchanged them.
        return grads
    if tf.executing_eagerly():
        raise StrategyError(
            asked="batch_gradients in a loop that isn't traced",
            found="what is computed from its gradients can't be told from others there",
            remedy="Call strategy.run in a tf.function",
        )
    totals = reduced(grads, variables, weighted=frozenset(range(len(grads))))
    if this_step.shards_weights:
        totals = handed_on(totals, variables, whole=True)
    exchanged_in_graph().add(
        [each for each in totals if each is not None],
        [variable for each, variable in zip(totals, variables, strict=True) if each is not None],
    )
    return totals
