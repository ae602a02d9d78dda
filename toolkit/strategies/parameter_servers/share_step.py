"""What a synchronous round's step knows of the round while it is traced for one worker's share of the batch."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers.local_values import LocalValue
from toolkit.strategies.parameter_servers.variables import LocalScope
from toolkit.strategies.step.batch_share import Share, current

__all__ = ["RoundShare", "ShareStep"]


class RoundShare(Share):
    """A worker's share of a round. It can't ask the others for theirs.

    Args:
        rows: How many examples it has.
        weight: Returns its part of the batch's examples, a float64 scalar.
        note: Takes why the step can't be divided.
    """

    def __init__(self, rows: tf.Tensor, weight: Callable[[], tf.Tensor], note: Callable[[str], None]) -> None:
        super().__init__(rows)
        self._make, self._note = weight, note
        self._gradients: dict[int, tuple[tf.Tensor, int]] = {}  # By id, with the number of operations that used them.

    @property
    def weight(self) -> tf.Tensor:
        """Its part of the batch's examples, a float64 scalar."""
        if self._weight is None:
            self._weight = self._make()
        return self._weight

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Records that the step can't be divided, because it needs what all shares have."""
        self._note("it needs the whole batch, as masks, sample weights and some losses and metrics do")
        return x

    rows_of_all = total

    def has_gradients(self, gradients: list[tf.Tensor]) -> None:
        """Records gradients that may be applied unchanged."""
        self._gradients |= {id(each): (each, len(each.consumers())) for each in gradients}

    def check_unchanged(self, grads: list) -> None:
        """Records that the step can't be divided if gradients are used before they are applied."""
        given = tf.nest.flatten([each for each in grads if each is not None], expand_composites=True)
        used = (len(each.consumers()) != before for each, before in self._gradients.values())
        if any(id(each) not in self._gradients for each in given) or any(used):
            self._note("it does something with gradients, which are those of a share, before they are applied")

    def keeps_whole(self, metric: keras.Metric, *, over_batches: bool) -> None:  # noqa: ARG002
        """The same, for a metric whose state isn't a sum."""
        self.total(tf.zeros([]))


class ShareStep:
    """The step of one share, which stores the gradients that an optimizer will apply.

    Args:
        rounds: The `Rounds`.
        scope: The step's own copy of variables.
        share: The share's index, an int64 scalar.
    """

    def __init__(self, rounds: Any, scope: LocalScope, share: tf.Tensor) -> None:
        self.rounds = rounds
        self.scope = scope
        self.share = share
        self.applied = False

    def apply_scaled(self, optimizer: Any, grads: list, variables: list) -> None:
        """As `apply`."""
        self.apply(None, optimizer, grads, variables)  # The loss's scale is divided out when the round is applied.

    def apply(self, _original: Any, optimizer: Any, grads: list, variables: Any) -> None:
        """Stores gradients, or records why that isn't possible."""
        if self.applied or optimizer is not self.rounds.variables.model.optimizer:
            self.rounds.note("it applies gradients several times, or by another optimizer than the model's")
        elif self.scope.within:
            self.rounds.note("it applies gradients in a branch, a loop or a function")
        else:
            if isinstance(share := current(), RoundShare):
                share.check_unchanged(grads)
            self.rounds.store(grads, variables, self.share)
        self.applied = True
        for v in variables:
            before = self.scope.values.get(id(v))
            if isinstance(before, LocalValue):
                self.scope.values[id(v)] = _NotUpdatedYet(before, self.rounds.note)


class _NotUpdatedYet(LocalValue):
    """A variable whose gradient is stored, and applied when the step has ended."""

    def __init__(self, before: LocalValue, note: Callable[[str], None]) -> None:
        super().__init__(before.handle, trainable=before.trainable)
        self.shape = before.shape
        self._before, self._note = before, note

    def current(self) -> tf.Tensor:
        self._note("it reads variables after it has applied their gradients")
        return self._before.current()
