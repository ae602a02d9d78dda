"""What a step computes on its way: the outputs of layers, and the gradients that optimizers apply.

They are noted in the order in which they are computed, while the step is traced: on replicas as well as on one device.
What is in a branch, a loop or a function within the step isn't noted: its tensors are of another graph.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.strategies.check.state import Of
from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import replaced
from toolkit.strategies.upstream.wrapping import instead
from toolkit.support.frames import line_of, users_frame


class Note(NamedTuple):
    """A tensor that a step computes.

    Attributes:
        of: Whether it is an output or a gradient.
        name: Such as "the output of dense_1".
        line: The script's line that computes it; "" if that isn't known.
    """

    of: Of
    name: str
    line: str


class Notes:
    """The notes of a step's trace.

    Attributes:
        by_replica: By the replica, what was noted, in order: the last trace's.
    """

    def __init__(self) -> None:
        self.by_replica: dict[int, list[Note]] = {}
        self._tensors: dict[int, list[Any]] = {}
        self._times: dict[tuple[int, str], int] = {}

    def noted(self, optimizers: Sequence[Any], step: Callable) -> Callable:
        """Returns a function that makes a step and also returns, by the replica, the tensors that are noted.

        Args:
            optimizers: Those that the step may use.
            step: Takes anything; is traced.
        """

        def made(*args: Any) -> tuple[Any, dict[int, list]]:
            self.by_replica, self._tensors, self._times = {}, {}, {}
            graph = tf.compat.v1.get_default_graph()
            replaced.LAYER.answer()  # Not while it is replaced here, which ends first.
            inside = [getattr(each, "inner_optimizer", each) for each in optimizers]
            before = [vars(inner).get(_APPLY) for inner in inside]
            for inner in inside:
                vars(inner)[_APPLY] = self._noting_gradients(getattr(inner, _APPLY), graph)
            try:
                with instead(keras.layers.Layer, "__call__", lambda call: self._noting_outputs(call, graph)):
                    return step(*args), {replica: list(tensors) for replica, tensors in self._tensors.items()}
            finally:
                for inner, value in zip(inside, before, strict=True):
                    if value is None:
                        del vars(inner)[_APPLY]
                    else:
                        vars(inner)[_APPLY] = value

        return made

    def _noting_outputs(self, call: Callable, graph: Any) -> Callable:
        def noting(layer: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            if this_step.recorded is None:
                line = line_of(users_frame(sys._getframe(1)))
                for each in keras.tree.flatten(outputs):
                    self._take(
                        Of.OUTPUT, f"the output of {getattr(layer, 'path', None) or layer.name}", each, line, graph
                    )
            return outputs

        return noting

    def _noting_gradients(self, apply: Callable, graph: Any) -> Callable:
        def noting(grads: Any, trainable_variables: Any) -> Any:
            # The last layer's gradients are computed first.
            for gradient, variable in reversed(list(zip(grads, trainable_variables, strict=False))):
                name = f"the gradient of {getattr(variable, 'path', variable.name)}"
                self._take(Of.GRADIENT, name, gradient, "", graph)
            return apply(grads, trainable_variables)

        return noting

    def _take(self, of: Of, name: str, value: Any, line: str, graph: Any) -> None:
        if isinstance(value, tf.IndexedSlices):
            if value.dense_shape is None or value.values.graph is not graph:
                return
            value = tf.convert_to_tensor(value)
        if not isinstance(value, tf.Tensor) or getattr(value, "graph", None) is not graph:
            return
        replica = this_step.replica
        count = self._times[replica, name] = self._times.get((replica, name), 0) + 1
        numbered = name if count == 1 else f"{name}, {count}"
        known = "" if line == "an unknown place" else line
        self.by_replica.setdefault(replica, []).append(Note(of, numbered, known))
        self._tensors.setdefault(replica, []).append(value)


_APPLY = "_backend_apply_gradients"
