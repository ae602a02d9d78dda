"""The variables of a compiled model, by what a step does with them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.ledger import Ledger
from toolkit.strategies.parameter_servers.local import Stand, fetch
from toolkit.strategies.parameter_servers.placement import devices_of
from toolkit.strategies.parameter_servers.sharded import Sharded

__all__ = ["Variables"]


class Variables:
    """The variables of a compiled model, by what a step does with them.

    Args:
        model: Built, under the strategy's scope.
        ledgers: Of each ps device.

    Attributes:
        held: Of the model, on the ps: pulled.
        counting: Of model and optimizer, with the chief: their values come with the step.
        metrics: Running sums, which start anew in each dispatch.
        applied_on: The ps that traced steps apply gradients on; there may be more ps than variables.
    """

    def __init__(self, model: Any, ledgers: dict[str, Ledger]) -> None:
        self.model = model
        self.ledgers = ledgers
        self.applied_on: set[str] = set()
        optimizer = list(model.optimizer.variables) if model.optimizer is not None else []
        with_chief = lambda v: all("/job:ps" not in device for device in devices_of(v.value))  # noqa: E731
        self.held = [v for v in model.variables if not with_chief(v)]
        self.counting = [v for v in (*model.variables, *optimizer) if with_chief(v)]
        self.metrics = list(model.metrics_variables)
        # What their `value` is outside of any step.
        self.values = {id(v): v.value for v in (*model.variables, *optimizer)}
        self.sharded = {key: value for key, value in self.values.items() if isinstance(value, Sharded)}

    def pieces(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the `tf.Variable`s that make them up."""
        return [part for v in variables for part in getattr(self.values[id(v)], "parts", [self.values[id(v)]])]

    def pull(self) -> tuple[list[Stand], dict[str, tf.Tensor]]:
        """Brings the held variables here, and says which version each ps was at."""
        parts, versions = fetch(self.pieces(self.held), self.ledgers)
        values, place = [], 0
        for variable in self.held:
            count = len(getattr(self.values[id(variable)], "parts", [None]))
            mine = parts[place : place + count]
            place += count
            values.append(Stand(tf.concat(mine, 0) if count > 1 else mine[0], trainable=bool(variable.trainable)))
        return values, versions
