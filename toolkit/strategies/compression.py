"""What a way of sending gradients in fewer bytes is: a class that users write, or one of the toolkit's own.

It says which gradients it takes, what a replica keeps of each from step to step, and how replicas exchange them. The
rest is the same for all, and `step/compressed.py` does it: shares of the batch, what is sent as it is, accumulated
steps, loss scales, checkpoints.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tensorflow as tf


class Replicas(Protocol):
    """By what a compression exchanges, in one step.

    Attributes:
        count: How many replicas there are.
    """

    count: int

    def sum(self, tensors: "Sequence[tf.Tensor]") -> "list[tf.Tensor]":
        """Returns the sums over all replicas of float32 tensors of any shape, by one exchange.

        It is sent in the dtype of `GradientExchange`. The first such sum also has the gradients that are sent as they
        are.
        """

    def gather(self, tensor: "tf.Tensor") -> "tf.Tensor":
        """Returns all replicas' tensors: [n, ...], alike on all, to [replicas, n, ...].

        float32 is sent in the dtype of `GradientExchange`, integers in their own.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that a replica keeps for one gradient from step to step. A checkpoint has it.

    Attributes:
        shape: Its shape, of at least one axis.
        initial: Its value before the first step; None for zeros, as all tensors begin that are a replica's own.
        own: Whether each replica has its own, such as what it hasn't sent yet, in the gradient's units: under a loss
            scale it is scaled as the gradient is. Otherwise the tensor is the same on all replicas, and in no units.
    """

    shape: tuple[int, ...]
    initial: Any = None
    own: bool = True


class Compression(abc.ABC):
    """A way of sending gradients in fewer bytes: for `GradientExchange(compression=...)`, with other numbers.

    Two of one class with the same attributes are the same.
    """

    @abc.abstractmethod
    def takes(self, shape: tuple[int, ...]) -> bool:
        """Returns whether it sends the gradient of a variable of this shape; others are sent as they are.

        It isn't asked about tables, of which only the rows looked up are sent, nor about variables in shards.
        """

    @abc.abstractmethod
    def keeps(self, shape: tuple[int, ...], number: int) -> Mapping[str, Kept]:
        """Returns what a replica keeps for the gradient of a variable, by name.

        Args:
            shape: The variable's.
            number: Its number among those that the optimizer trains, such as for a seed.
        """

    @abc.abstractmethod
    def exchange(
        self, gradients: "Sequence[tf.Tensor]", kept: "Sequence[Mapping[str, tf.Tensor]]", replicas: Replicas
    ) -> "tuple[list[tf.Tensor], list[Mapping[str, tf.Tensor]]]":
        """Returns the sums over all replicas of what they send, the same on all, and what this replica keeps then.

        It is traced once, on each replica, and must exchange the same on all.

        Args:
            gradients: This replica's part of the gradients that it takes, of a sum over replicas; float32, each of its
                variable's shape. The last layer's comes first.
            kept: For each, what this replica has kept of it.
            replicas: By which it exchanges.
        """

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))
