"""A user's own training loop in a run: `fit` reads the batches, and the user's function computes a step."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from toolkit import strategies
from toolkit.errors import RequestError
from toolkit.strategies.upstream import train_function


class Loop(keras.Model):
    """Stands for a user's models and optimizers when `fit` and a checkpoint need one model.

    Args:
        step: Is given each batch, as the strategy distributes it; returns the step's logs, a loss, or None.
        state: What a checkpoint holds, by name: models, optimizers, metrics, variables.
    """

    def __init__(self, step: Callable[[Any], Any], state: Mapping[str, Any]) -> None:
        super().__init__(name="loop")
        self.step = step
        self.parts = dict(state)
        self._logs: dict[str, Any] = {}
        for name, value in state.items():
            setattr(self, f"part_{name}", value)  # Keras and TensorFlow find trackable objects among attributes.
        self.built = True
        self.compile(optimizer=None)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics among its parts, without the loss's mean that `compile` creates."""
        leaves = keras.tree.flatten(list(self.parts.values()))
        return [part for part in leaves if isinstance(part, keras.metrics.Metric)]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns what the last step returned, or before the first step the metrics' results."""
        return dict(self._logs) or {metric.name: metric.result() for metric in self.metrics}

    @property
    def models(self) -> dict[str, keras.Model]:
        """The models among its parts, by name."""
        return {name: part for name, part in self.parts.items() if isinstance(part, keras.Model)}

    def save(self, filepath: Any, **options: Any) -> None:
        """Saves the only model among its parts."""
        (model,) = self.models.values()
        model.save(filepath, **options)

    def make_train_function(self, force: bool = False) -> Callable:
        """Makes the user's function the step that `compile` would have created."""

        def train(iterator: Any) -> dict[str, Any]:
            found = self.step(next(iterator))
            logs = found if isinstance(found, dict) else {} if found is None else {"loss": found}
            self._logs = {name: _value(value) for name, value in logs.items()}
            return self._logs

        train_function.replace(self, train=train)
        return train


def _value(value: Any) -> Any:
    return value.result() if isinstance(value, keras.metrics.Metric) else value


def loop_of(
    step: Callable[[Any], Any], state: Mapping[str, Any], *, best: Any = None, options: Mapping[str, Any] | None = None
) -> Loop:
    """Returns the model that stands for a loop, under the strategy of its parts.

    Args:
        step: The user's function of a step.
        state: What a checkpoint holds, by name.
        best: What keeps the best model; None for no such model.
        options: Those of `fit`.

    Raises:
        RequestError: The state can't be saved, or is that of parameter servers.
    """
    models = {name: part for name, part in state.items() if isinstance(part, keras.Model)}
    if not models:
        raise RequestError(
            asked="state names what a checkpoint of the loop holds",
            found=f"there is no model in it, only {', '.join(state) or 'nothing'}",
            remedy='Give state={"model": model, "optimizer": optimizer}',
        )
    for name, model in models.items():
        if not model.built:
            raise RequestError(
                asked=f"the loop trains state[{name!r}]",
                found="it has no variables yet, so no checkpoint could be restored into it",
                remedy="Call it once, or its build(input_shape), before the loop",
            )
    if options and options.get("validation_data") is not None:
        raise RequestError(
            asked="validation_data is given to a loop",
            found="only your own code can evaluate its models",
            remedy="Evaluate in on_epoch_end of a callback, and leave validation_data out",
        )
    if best is not None and len(models) > 1:
        raise RequestError(
            asked="best= keeps the best model",
            found=f"the loop has several: {', '.join(models)}",
            remedy="Leave best out, and save them in your own callback",
        )
    strategy = next(iter(models.values())).distribute_strategy
    if not strategies.computes_here(strategy):
        raise RequestError(
            asked="a loop's step is called in this process",
            found="with parameter servers the workers do the steps",
            remedy="Write the step as Model.train_step, and call Run.fit",
        )
    with strategy.scope():
        return Loop(step, state)
