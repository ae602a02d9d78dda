"""A step as plain Keras makes it on one device: the same model and objects, beside the strategy's own step.

While it is traced, each Keras variable holds a plain `tf.Variable`, nothing of Keras's is replaced, methods that were
attached are away, and no strategy is in scope: a thread has its own. Optimizers really apply. Afterwards everything is
as it was; what the step has drawn and changed are the plain variables.

A rounding moves each number by a part of itself, up or down by chance. `run` moves weights, inputs, the outputs of
layers and gradients so, and what that changes of a result is what rounding may change of it. Of two equal outputs
another one may be the largest then, and what was just above zero just below it. Gradients that are zero on paper are
what rounding makes of them, and Adam makes a whole step of the smallest.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.check.notes import Notes
from toolkit.strategies.check.state import Held, Objects, Of, of_model
from toolkit.strategies.step import xla
from toolkit.strategies.step.share import WholeShare, attached, entered
from toolkit.strategies.upstream import private, train_function
from toolkit.strategies.upstream.wrapping import away, instead
from toolkit.support.graphs import outside

_SEEDS = "global_seed_generator"  # Keras's name for it.
_NAMES = "object_name_uids"  # Which names of layers Keras has given.


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a step is traced.

    Attributes:
        model: The model whose `train_step` or the like it is; None for another function.
        strategy: Whose methods such a function calls; None if it calls none.
        eagerly: Whether it isn't traced, but Python makes it each time.
        notes: Notes what the step computes on its way; None to compute it as Keras does.
        unsized: For each component of a batch, flattened, whether its number of rows isn't known when it is traced;
            () if all are.
        sums: Whether sums are moved, too: see `PlainStep.in_other_orders`.
    """

    model: Any = None
    strategy: Any = None
    eagerly: bool = False
    notes: Notes | None = None
    unsized: tuple[bool, ...] = ()
    sums: bool = False


class PlainStep:
    """A step, as one device makes it.

    Args:
        objects: What it uses of Keras's; built.
        make: Returns a function that takes the batches and makes the step. It is called where everything is plain.
        batches: Whole batches, as many as the function takes.
        settings: What is traced in which way.

    Attributes:
        batches: The same.
        held: What the step may change; complete once it is traced.
        eps: One rounding of the coarsest dtype in which the step computes.
        draws: The types of operations that draw by a state of TensorFlow's; known once it is traced.
    """

    def __init__(
        self, objects: Objects, make: Callable[[], Callable], batches: Sequence[Any], settings: Settings | None = None
    ) -> None:
        self._objects, self._make, self.settings = objects, make, settings or Settings()
        self.batches = list(batches)
        self._leaves = [each for each in tf.nest.flatten(self.batches) if tf.is_tensor(each)]
        self._seeds = private.global_state.get_global_attribute(_SEEDS)
        self.held = objects.held([] if self._seeds is None else [self._seeds])
        self.eps = rounding_of(objects.layers, self._leaves)
        self.draws: list[str] = []
        self.draws_by_seed = False
        self._call: Callable[[list], Any] | None = None
        self._plain: list[Any] = []  # For each of `held`.
        self._moves: Any = None
        self._of_thread = dict(vars(private.global_state.GLOBAL_STATE_TRACKER))

    def trace(self) -> None:
        """Traces the step, and changes nothing.

        Raises:
            Whatever the model's own step raises on one device.
        """
        outside(self._trace)

    def in_other_orders(self) -> "PlainStep":
        """Returns the same step, not traced yet, whose `run` also moves what layers add up.

        A sum of many numbers that are alike, such as the gradient of a bias behind an average of a picture, loses the
        same part of each of them, as large as a rounding of the sum: of a hundred thousand some thousandths may be
        lost, and of fewer less. Gradients that are moved by as much lose other parts. A batch's moments are added up in
        another order.
        """
        settings = dataclasses.replace(self.settings, sums=True)
        return PlainStep(self._objects, self._make, self.batches, settings)

    def run(self, before: Sequence[np.ndarray], *, draw: int = 0, times: float = 1.0) -> tuple[Any, list[np.ndarray]]:
        """Makes the step.

        Args:
            before: What each of `held` holds before it.
            draw: Moves weights, inputs and gradients by a rounding, each number of this another way; 0 moves nothing.
            times: By how many roundings.

        Returns:
            What the model's function returns, of NumPy arrays; and what each of `held` holds then.
        """
        return outside(lambda: self._run(before, draw, self.eps * times))

    def _run(self, before: Sequence[np.ndarray], draw: int, eps: float) -> tuple[Any, list[np.ndarray]]:
        chance = np.random.default_rng(draw)
        for held, plain, value in zip(self.held, self._plain, before, strict=True):
            plain.assign(moved(value, eps, chance) if draw and held.is_moved else value)
        self._moves.assign([eps if draw else 0.0, float(draw)])
        leaves = [tf.nest.map_structure(lambda x: _moved(x, eps, chance), x, expand_composites=True) if draw else x
                  for x in self._leaves]  # fmt: skip
        logs = self._call(leaves)  # type: ignore[misc]
        return keras.tree.map_structure(_array, logs), [each.numpy() for each in self._plain]

    def _trace(self) -> None:
        self._plain = [_plain_variable(each) for each in self.held]
        self._moves = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)
        if self.settings.eagerly:
            self._call = self._eagerly
            return
        with self._as_plain_keras():
            function = self._make()
            traced = tf.function(self._step(function), autograph=False)
            concrete = traced.get_concrete_function(self._specs())
        self._take_in(concrete)
        operations = {each.type for each in concrete.graph.get_operations()}
        operations |= {each.op for one in concrete.graph.as_graph_def().library.function for each in one.node_def}
        self.draws = sorted(each for each in operations if _draws_by_state(each))
        self.draws_by_seed = any(each.startswith(("StatelessRandom", "StatelessTruncated")) for each in operations)
        self._call = concrete

    def _specs(self) -> list:
        """Returns what the step is traced with: Keras takes a size that is known for a batch's weight."""
        every = tf.nest.flatten(self.batches)
        unsized = self.settings.unsized or (False,)

        def one(number: int, leaf: Any) -> Any:
            dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank and unsized[number % len(unsized)]
            return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if dense else leaf

        return [one(number, leaf) for number, leaf in enumerate(every) if tf.is_tensor(leaf)]

    def _step(self, function: Callable) -> Callable:
        step = lambda leaves: function(self._packed(leaves))  # noqa: E731
        notes = self.settings.notes
        return step if notes is None else notes.noted(self._objects.optimizers, step)

    def _eagerly(self, leaves: list) -> Any:
        with self._as_plain_keras():
            function = self._make()
            return function(self._packed(leaves))

    def _packed(self, leaves: Sequence[Any]) -> list:
        given = iter(leaves)
        every = [next(given) if tf.is_tensor(each) else each for each in tf.nest.flatten(self.batches)]
        return tf.nest.pack_sequence_as(self.batches, every)

    def _take_in(self, concrete: Any) -> None:
        """Gives the function a copy of each variable that it has found by itself, such as a global one of the script's.

        It must not change the script's.
        """
        own = {id(each.handle) for each in (*self._plain, self._moves)}
        by_handle = {id(each.handle): each for each in concrete.variables}
        captured = list(concrete.captured_inputs)
        for number, handle in enumerate(captured):
            variable = by_handle.get(id(handle))
            if handle.dtype == tf.resource and variable is not None and id(handle) not in own:
                held = Held(variable.name.partition(":")[0], Of.STATE, None, value=variable)
                copied = _plain_variable(held)
                self.held.append(held)
                self._plain.append(copied)
                captured[number] = copied.handle
        concrete.set_external_captures(captured)

    @contextlib.contextmanager
    def _as_plain_keras(self) -> Iterator[None]:
        """A context in which the model is plain Keras's, with plain variables. It is entered in another thread."""
        with contextlib.ExitStack() as stack:
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state(legacy=True))
            stack.enter_context(away())
            stack.enter_context(instead(keras.layers.Layer, "__call__", self._with_moved_outputs))
            if self.settings.sums:
                stack.enter_context(instead(keras.layers.BatchNormalization, "_moments", self._with_other_moments))
            self._set_thread()
            put = _Put(stack)
            self._put_variables(put)
            self._put_objects(put)
            if self.settings.strategy is not None:
                stack.enter_context(entered(WholeShare()))  # It has one replica then.
                for name, method in _ALONE.items():
                    put(self.settings.strategy, name, method)
            self._put_optimizers(put)
            yield

    def _put_variables(self, put: "_Put") -> None:
        for each, plain in zip(self.held, self._plain, strict=True):
            if each.variable is None and each.holder is not None:
                put(each.holder, each.attribute, plain)
            elif each.variable is not None:
                put(each.variable, "_value", plain)
                if hasattr(each.variable, "_plain"):  # A shard of it, outside of a step the whole.
                    put(each.variable, "_plain", plain)

    def _put_objects(self, put: "_Put") -> None:
        for each in self._objects.models:
            put(each, "_distribute_strategy", None)
        model = self.settings.model
        if model is not None:
            if self.settings.notes is not None:  # Keras computes all of it in one graph then.
                put(model, "_run_eagerly", True)
            put(model, "_jit_compile", xla.meant_alone(model) and not model.run_eagerly)
        for each in self._objects.layers:
            put(each, "_losses", [])
            put(each, "_loss_ids", set())

    def _put_optimizers(self, put: "_Put") -> None:
        for each in self._objects.optimizers:
            for one in filter(None, (each, getattr(each, "inner_optimizer", None))):
                put(one, "_distribution_strategy", tf.distribute.get_strategy())
                if getattr(one, "_trainable_variables_indices", None) is not None and one.built:
                    keys = {one._var_key(v): number for number, v in enumerate(one._trainable_variables)}
                    put(one, "_trainable_variables_indices", keys)
            put(each, "apply", functools.partial(self._apply, each))

    def _set_thread(self) -> None:
        """Gives this thread what Keras keeps for the script's, such as its policy, and its own counts of names."""
        for name, value in self._of_thread.items():
            private.global_state.set_global_attribute(name, copy.deepcopy(value) if name == _NAMES else value)

    def _apply(self, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Applies gradients as the optimizer's class does, after a rounding has moved them."""
        grads = list(grads)
        sizes = [_size(each) for each in grads]
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        layers = [each.path.rpartition("/")[0] for each in variables] if len(variables) == len(grads) else sizes
        # Of what cancels, such as the gradient of a bias before a normalisation, what is left is as large as a rounding
        # of what the layer's other gradients are made of.
        largest = [
            tf.reduce_max([size for size, of in zip(sizes, layers, strict=True) if size is not None and of == layer])
            if own is not None
            else None
            for own, layer in zip(sizes, layers, strict=True)
        ]
        grads = [self._with_noise(*each) for each in zip(range(len(grads)), grads, largest, strict=True)]
        return type(optimizer).apply(optimizer, grads, trainable_variables)

    def _with_noise(self, number: int, gradient: Any, size: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = self._with_noise(number, gradient.values, size)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        noise = tf.cast(self._signs(gradient, number) * self._moves[0] * size, gradient.dtype)
        return tf.where(self._moves[0] > 0, gradient + noise, gradient)

    def _with_moved_outputs(self, call: Callable) -> Callable:
        numbers = itertools.count(1000)

        def one(x: Any) -> Any:
            if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
                return x
            number = next(numbers)

            @tf.custom_gradient  # For which nothing is kept: one device has to hold the whole batch's outputs.
            def moved(x: tf.Tensor) -> tuple:
                noise = tf.cast(self._signs(x, number) * self._moves[0], x.dtype)
                # Whole numbers stay: they may count, or name something.
                found = tf.where((self._moves[0] > 0) & (x != tf.round(x)), x + x * noise, x)
                return (
                    found,
                    lambda upstream: self._with_lost_parts(upstream, number) if self.settings.sums else upstream,
                )

            return attached(x, moved(x), lambda kept: kept)

        def moving(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return keras.tree.map_structure(one, call(layer, *args, **kwargs))

        return functools.wraps(call)(moving)

    def _with_other_moments(self, moments: Callable) -> Callable:
        """Adds up each example's numbers first, and then those of the batch; and moves the moments.

        In the gradient of a normalised batch of two, nearly all cancels: a rounding of the moments' is what is left.
        """
        numbers = itertools.count(2000)

        def one(x: Any) -> Any:
            return x * (1 + tf.cast(self._signs(x, next(numbers)) * self._moves[0], x.dtype))

        def found(layer: Any, inputs: Any, mask: Any) -> tuple:
            within = [axis for axis in layer._reduction_axes if axis != 0]
            if mask is not None or not within or len(within) == len(layer._reduction_axes):
                return tuple(map(one, moments(layer, inputs, mask)))

            def mean_of(x: Any) -> Any:
                return tf.reduce_mean(tf.reduce_mean(x, within, keepdims=True), 0, keepdims=True)

            mean = mean_of(inputs)
            return one(tf.squeeze(mean)), one(tf.squeeze(mean_of(tf.math.squared_difference(inputs, mean))))

        return found

    def _with_lost_parts(self, gradient: Any, number: int) -> Any:
        """Moves a gradient by a rounding of the sum of all rows and places."""
        exact = tf.cast(gradient, tf.float64)
        sums = tf.reduce_sum(tf.abs(exact), list(range(gradient.shape.rank - 1)), keepdims=True)
        part = min(1.0, eps_of(tf.float32) / self.eps)  # What has 16 bits is added up in more.
        lost = self._signs(gradient, number) * sums * self._moves[0] * part
        return tf.cast(exact + lost, gradient.dtype)

    def _signs(self, x: Any, number: int) -> Any:
        """Returns 1 or -1 for each element: as good as random, by no operation that a script's own step might have."""
        places = tf.cast(tf.range(tf.size(x)), tf.float64)
        signs = tf.sign(tf.sin(12.9898 * places + 78.233 * self._moves[1] + 39.425 * number))
        return tf.reshape(signs, tf.shape(x))


class _Put:
    """Sets attributes until a context ends, past what Keras does when one is set."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __call__(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        if name in own:
            self._stack.callback(own.__setitem__, name, own[name])
        else:
            self._stack.callback(own.pop, name, None)
        own[name] = value


def _plain_variable(held: Held) -> Any:
    value = held.value if held.variable is None else held.variable._value
    shape = value.shape if held.variable is None else held.variable.shape
    zeros = tf.zeros(shape, value.dtype) if value.dtype != tf.string else tf.fill(shape, "")
    return tf.Variable(zeros, trainable=value.trainable, name=value.name.partition(":")[0])


def _size(gradient: Any) -> Any:
    if gradient is None:
        return None
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_max(tf.abs(tf.cast(values, tf.float64))) if tf.as_dtype(values.dtype).is_floating else None


def _draws_by_state(operation: str) -> bool:
    return operation.startswith(
        ("Random", "TruncatedNormal", "ParameterizedTruncated", "Multinomial", "Stateful")
    ) and (not operation.startswith(("StatefulPartitionedCall", "RandomDataset")))


def _array(leaf: Any) -> Any:
    if leaf is None:
        return None
    return leaf.numpy() if tf.is_tensor(leaf) and hasattr(leaf, "numpy") else np.asarray(leaf)


# A strategy's methods, where there is one device.
_ALONE: dict[str, Callable] = {
    "run": lambda fn, args=(), kwargs=None, options=None: fn(*args, **(kwargs or {})),  # noqa: ARG005
    "reduce": lambda how, value, axis=None: tf.nest.map_structure(lambda x: _reduced(how, x, axis), value),
    "gather": lambda value, axis: value,  # noqa: ARG005
    "scope": contextlib.nullcontext,
    "experimental_local_results": lambda value: (value,),
}


def _reduced(how: Any, value: Any, axis: int | None) -> Any:
    if axis is None:
        return value
    mean = str(getattr(how, "value", how)).upper() == "MEAN"
    return tf.reduce_mean(value, axis) if mean else tf.reduce_sum(value, axis)


def step_of(
    model: Any, kind: str, batches: Sequence[Any], unsized: tuple[bool, ...] = (), notes: Notes | None = None
) -> PlainStep:
    """Returns a model's `train_step`, `test_step` or `predict_step`, as one device makes it.

    Args:
        model: Of a strategy of several replicas; built and compiled.
        kind: "train", "test" or "predict".
        batches: Whole batches, as many as a call of the model's function takes.
        unsized: As of `Settings`.
        notes: The same.
    """
    settings = Settings(model=model, eagerly=model.run_eagerly, notes=notes, unsized=unsized)
    return PlainStep(of_model(model), lambda: train_function.made_anew(model, kind), batches, settings)


def rounding_of(layers: Iterable[Any], leaves: Sequence[Any] = ()) -> float:
    """Returns one rounding, relative to a number, of the coarsest dtype in which layers compute, or that is given."""
    named = [getattr(each, "compute_dtype", None) for each in layers]
    named += [each.dtype.name for each in leaves if tf.is_tensor(each) and each.dtype.is_floating]
    dtypes = {tf.as_dtype(each) for each in named if each}
    return max((eps_of(each) for each in dtypes if each.is_floating), default=eps_of(tf.float32))


def eps_of(dtype: Any) -> float:
    """Returns the distance from 1 to the next number of a floating dtype."""
    return {2: 2.0**-10, 4: 2.0**-23, 8: 2.0**-52}[tf.as_dtype(dtype).size] * (8 if dtype == tf.bfloat16 else 1)


def moved(value: np.ndarray, eps: float, chance: np.random.Generator) -> np.ndarray:
    """Returns numbers that a rounding has moved up or down; whole ones, such as counts or classes, stay.

    Args:
        value: Of any dtype; what isn't floating stays.
        eps: The rounding, as a part of a number.
        chance: Draws which are moved up.
    """
    if not tf.as_dtype(value.dtype).is_floating or not value.size:
        return value
    exact = value.astype(np.float64)
    signs = chance.integers(0, 2, exact.shape) * 2.0 - 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.where(exact == np.round(exact), exact, exact * (1.0 + eps * signs))
    return found.astype(value.dtype)


def _moved(x: Any, eps: float, chance: np.random.Generator) -> Any:
    if not x.dtype.is_floating:
        return x
    return tf.constant(moved(x.numpy(), eps, chance), x.dtype)
