"""`Model.train_function`, `test_function` and `predict_function`, and the order of everything that stands around them.

They are what Keras calls for a step, or for `steps_per_execution` of them:

- `fit` and `train_on_batch` call `make_train_function()`, then `train_function(batches)` for each step: an iterator, or
  a generator of a script's own batch. It returns logs. `evaluate` and `predict` do the same with the other two.
- `make_train_function` keeps a function that is set, unless it is called with `force=True`.
- `compile` sets all three to None, and with them goes everything that stands around them.

Other files hand in what is to stand around a function, in any order: `Around` says where it stands. No other file of
this library reads or sets the three attributes.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

_Function = Callable[[Any], Any]  # Takes batches; returns logs, or predictions.
_Layer = Callable[[_Function, Any], Any]  # Takes the function within, and batches.


class Around(enum.Enum):
    """What can stand around a step function, from the outermost to the innermost, and why it stands there.

    Within all of them is `StepFunction.step`: Keras's function, a loop's own, or beside parameter servers the one that
    sends steps to workers.
    """

    SKIPPING = "A resumed run skips the steps before its checkpoint: nothing within may count or compute them"
    SPLITTING = "A script's own batch is split between replicas, once, also in the step at which the function changes"
    SWITCHING = "From some step on, gradients are compressed or replicas train locally: all within is made again then"
    AVERAGING = "Replicas that train locally average their weights after every so many steps, and not before they do"
    TIMING = "The first step says how long XLA took to compile it, averages not included"
    CHECKING = "The first step is compared with one device's: it needs the batches as replicas are given them"


class StepFunction:
    """A step, and what stands around it: what Keras finds on a model.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
        step: Takes batches; returns logs, or predictions.
        original: Has Keras make the step.
        put_around: Is given this function, to put around it what a step that was just made needs.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        step: _Function,
        original: Callable[[], Any] = lambda: None,
        put_around: Callable[["StepFunction"], None] = lambda _: None,
    ) -> None:
        self.step = step
        self._model, self._kind = model, kind
        self._original, self._put_around = original, put_around
        self._layers: dict[Around, _Layer] = {}

    def __call__(self, batches: Any) -> Any:
        """Makes a step, or `steps_per_execution` of them."""
        return self._call(tuple(Around), batches)

    def _call(self, places: tuple[Around, ...], batches: Any) -> Any:
        """Calls the outermost at these places. Each looks for the next one when it calls it: a layer may change it."""
        for number, place in enumerate(places, 1):
            if place in self._layers:
                return self._layers[place](functools.partial(self._call, places[number:]), batches)
        return self.step(batches)

    def put(self, place: Around, layer: _Layer | None) -> None:
        """Puts a layer at its place, instead of what stood there. None takes that out."""
        self._layers.pop(place, None)
        if layer is not None:
            self._layers[place] = layer
        elif not self._layers and _get(self._model, self._kind) is self:
            _set(self._model, self._kind, self.step)  # As it was before the first layer.

    def make_again(self) -> None:
        """Has Keras make the step again. A layer may call this; what stands outside of it stays."""
        outermost = _get(self._model, self._kind)  # A user's function may stand around this one.
        _set(self._model, self._kind, None)
        try:
            self._original()
            self.step = _get(self._model, self._kind)
        finally:
            _set(self._model, self._kind, outermost)
        self._put_around(self)


def make(model: Any, kind: str, original: Callable[[], Any], put_around: Callable[[StepFunction], None]) -> Any:
    """Has Keras make a model's function of this kind, unless it keeps one; returns what Keras returns.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
        original: Keras's `make_train_function` or its like, or that of the model's own class.
        put_around: Is given the new function, to put around it what it needs. If it raises, the model has what it had.
    """
    before = _get(model, kind)
    result = original()
    made = _get(model, kind)
    if made is not None and made is not before:
        _set(model, kind, before)
        function = StepFunction(model, kind, made, original, put_around)
        put_around(function)
        _set(model, kind, function)
    return result


def put(model: Any, kind: str, place: Around, layer: _Layer) -> StepFunction:
    """Puts a layer around the function that a model has; returns the whole, of which it can be taken out again."""
    function = wrapped(model, kind)
    function.put(place, layer)
    return function


def wrapped(model: Any, kind: str) -> StepFunction:
    """Returns the function that a model has, so that layers can be put around it."""
    function = _get(model, kind)
    if not isinstance(function, StepFunction):
        function = StepFunction(model, kind, function)
        _set(model, kind, function)
    return function


def replace(model: Any, **steps: _Function | None) -> None:
    """Sets the innermost steps of a model, by kind. With None, Keras makes the function again before it calls it."""
    for kind, step in steps.items():
        function = _get(model, kind)
        if step is not None and isinstance(function, StepFunction):
            function.step = step
        else:
            _set(model, kind, step)


def made_anew(model: Any, kind: str) -> Any:
    """Has Keras make a function of this kind, which the model doesn't keep, and returns it."""
    before = _get(model, kind)
    _set(model, kind, None)
    try:
        getattr(model, f"make_{kind}_function")()
        return _get(model, kind)
    finally:
        _set(model, kind, before)


def is_made(model: Any, kind: str) -> bool:
    """Whether a model has a function of this kind: it has none before its first `fit`, and after `compile`."""
    return _get(model, kind) is not None


def _get(model: Any, kind: str) -> Any:
    return getattr(model, f"{kind}_function")


def _set(model: Any, kind: str, function: _Function | None) -> None:
    setattr(model, f"{kind}_function", function)
