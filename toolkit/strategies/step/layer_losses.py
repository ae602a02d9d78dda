"""The losses that layers add, by replica: the replicas of a process are threads that take turns.

Keras keeps it in a list of each layer's. In layers of a model of several replicas that list is one in which every
replica sees what it has put there itself.
"""

from collections import UserList
from collections.abc import Callable
from typing import Any

from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.mesh import replica_count
from toolkit.support.wrapping import attach

__all__ = ["attach_to"]

_LOSSES = "_losses"


class _ByReplica(UserList):
    """A list for each replica; if there is none, the first one's."""

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
    """Makes a model's layers keep their losses by replica when one of them calls it."""
    attach(model, "_clear_losses", _clear)


def _clear(original: Callable, model: Any) -> None:
    """Keras calls it when a call of the model begins."""
    if replica_count() > 1:
        for layer in model._flatten_layers():
            kept = vars(layer)  # Avoids Keras's actions when an attribute is set.
            if not isinstance(kept[_LOSSES], _ByReplica):
                kept[_LOSSES] = _ByReplica(kept[_LOSSES])
    original(model)
