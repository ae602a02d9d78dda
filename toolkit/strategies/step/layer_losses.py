"""What layers add to the loss, kept by replica: the replicas of a process are threads, which take turns.

Keras keeps it in a list of each layer's. In layers of a model of several replicas that list is one in which every
replica sees what it has put there itself.
"""

from collections import UserList
from collections.abc import Callable
from typing import Any

from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.mesh import replicas
from toolkit.support.wrapping import attach

__all__ = ["attach_to"]

_LOSSES = "_losses"


class _ByReplica(UserList):
    """A list for each replica; where there is none, the first one's."""

    def __init__(self, shared: Any) -> None:
        self._kept = {0: list(shared)}

    @property
    def data(self) -> list:  # type: ignore[override]
        """This replica's."""
        return self._kept.setdefault(collectives.own_id(), [])

    def __reduce__(self) -> tuple:
        return list, (list(self),)

    def __getitem__(self, place: Any) -> Any:
        return self.data[place]


def attach_to(model: Any) -> None:
    """Has the layers of a model, with those in it, keep their losses by replica where one of them calls it."""
    attach(model, "_clear_losses", _clear)


def _clear(original: Callable, model: Any) -> None:
    """Keras calls it where a call of the model begins."""
    if replicas() > 1:
        for layer in model._flatten_layers():
            kept = vars(layer)  # Passes by what Keras does when an attribute is set.
            if not isinstance(kept[_LOSSES], _ByReplica):
                kept[_LOSSES] = _ByReplica(kept[_LOSSES])
    original(model)
