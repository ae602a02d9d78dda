"""Recomputes activations in the backward pass instead of keeping them: `keras.RematScope`.

Keras leaves it to `tf.recompute_grad`, which takes no keyword arguments in a graph, where Keras always gives one
(`training`), and which draws dropout again. Here the second computation sees what the first one saw: the values that
seeds and statistics had before it, Keras's masks, and the mixed precision and the mode of training that it was called
in. It imports TensorFlow, and is imported where that is wanted.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import ModelError
from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import private

_OF_CALLS = ("current_call_ctx", "autocast_scope")  # What Keras records per thread about the layers being called.


def remat(_original: Callable, function: Callable) -> Callable:
    """Makes `keras.RematScope` and `keras.remat` work on TensorFlow, in the place of Keras's function for it."""
    return recomputed(function)


def recomputed(function: Callable) -> Callable:
    """Returns a function that keeps only its arguments and results for the backward pass, where it runs again.

    Its results and its gradients are the same. It runs once where nothing would be gained or known: outside of graphs,
    within another that runs again, in a `keras.StatelessScope` (so under parameter servers), for the model that is
    called itself, or without a floating tensor among its arguments.

    Args:
        function: A layer's `call`, another method of a layer, or a function.

    Raises:
        ModelError: When its gradients are made: it changes variables that aren't its layer's, such as another's seed.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = {id(each): each for each in keras.tree.flatten((args, kwargs)) if isinstance(each, tf.Tensor)}
        floating = any(each.dtype.is_floating for each in tensors.values())
        if tf.executing_eagerly() or not floating or _is_plain(getattr(function, "__self__", None)):
            return function(*args, **kwargs)
        return _call(function, args, kwargs, list(tensors.values()))

    return call


def _is_plain(owner: Any) -> bool:
    calls = private.global_state.get_global_attribute("current_call_ctx")
    called = isinstance(owner, keras.Model) and calls is not None and calls.entry_layer is owner
    stateless = private.global_state.get_global_attribute("stateless_scope") is not None
    return called or stateless or this_step.recomputes


def _call(function: Callable, args: Sequence, kwargs: Mapping, tensors: list) -> Any:
    layer = getattr(function, "__self__", None)
    state = layer.non_trainable_variables if isinstance(layer, keras.layers.Layer) else []
    before = [(variable, tf.convert_to_tensor(variable.value)) for variable in state]  # The call changes them.
    around = {name: private.global_state.get_global_attribute(name) for name in _OF_CALLS}
    masks = [private.masking.get_keras_mask(each) for each in tensors]  # Keras removes them again.
    results: list = []

    def gradients(*upstream: tf.Tensor, variables: Sequence = ()) -> Any:
        # As in tf.recompute_grad: XLA ignores control dependencies, so the recomputation must depend on the incoming
        # gradient, or it would be found to be equal to the forward pass and kept.
        some = tf.cast(tf.reduce_max(tf.reshape(upstream[0], [-1])[:1]), tf.bool)
        zero = tf.where(some == some, 0.0, float("nan"))  # noqa: PLR0124
        with tf.GradientTape() as tape:
            again = {
                id(each): _masked(
                    each + tf.cast(zero, each.dtype) if each.dtype.is_floating else tf.identity(each), mask
                )
                for each, mask in zip(tensors, masks, strict=True)
            }
            tape.watch([each for each in again.values() if each.dtype.is_floating])
            given = keras.tree.map_structure(lambda each: again.get(id(each), each), (args, kwargs))
            with _set(around), _once(), _AsBefore(function, before):
                recomputed = [
                    each for each in keras.tree.flatten(function(*given[0], **given[1])) if tf.is_tensor(each)
                ]
        pairs = [(each, back) for each, back in zip(recomputed, upstream, strict=True) if each.dtype.is_floating]
        sources = [*again.values(), *variables]
        found = tape.gradient([each for each, _ in pairs], sources, output_gradients=[back for _, back in pairs])
        mine, others = found[: len(again)], found[len(again) :]
        return (mine, others) if variables else mine

    @tf.custom_gradient
    def first(*_copies: tf.Tensor) -> Any:
        with _once():
            results.append(function(*args, **kwargs))  # Not for the copies, which lack Keras's masks.
        return [each for each in keras.tree.flatten(results[0]) if tf.is_tensor(each)], gradients

    returned = iter(first(*tensors))
    return keras.tree.map_structure(
        lambda each: _masked(next(returned), private.masking.get_keras_mask(each)) if tf.is_tensor(each) else each,
        results[0],
    )


def _masked(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    private.masking.set_keras_mask(tensor, mask)
    return tensor


class _AsBefore(keras.StatelessScope):
    """A context in which variables have their earlier values and don't change."""

    def __init__(self, function: Callable, before: Sequence[tuple]) -> None:
        super().__init__(before, initialize_variables=False)
        self._function, self._own = function, {id(variable) for variable, _ in before}

    def add_update(self, update: tuple) -> None:
        """Takes an assignment while the context is entered."""
        if id(update[0]) not in self._own:
            raise ModelError(
                asked=f"rematerialization runs {getattr(self._function, '__qualname__', self._function)} twice",
                found=f"it changes {update[0].path}, which isn't its layer's own, so the second run would differ",
                remedy="Make it the call of a keras.layers.Layer that has that variable, seed or layer as an attribute",
            )
        super().add_update(update)


def _once() -> contextlib.AbstractContextManager[None]:
    """What is called here runs once: it is part of something that runs again."""
    return this_step.having(recomputes=True)


@contextlib.contextmanager
def _set(attributes: Mapping[str, Any]) -> Iterator[None]:
    outer = {name: private.global_state.get_global_attribute(name) for name in attributes}
    for name, value in attributes.items():
        private.global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in outer.items():
            private.global_state.set_global_attribute(name, value)
