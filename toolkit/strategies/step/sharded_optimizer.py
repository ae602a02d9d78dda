"""Optimizers whose state is in shards: slots of sharded variables, and ZeRO-1's parts of all others."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import REPLICATED, Among, Layout, is_of_whole, layout_of, replica_count
from toolkit.strategies.options import options_of
from toolkit.strategies.step import collectives, overlap
from toolkit.strategies.step.gradients import Exchange, mapped, rows_of_replicas, sent_as, values_of
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable, StandIn
from toolkit.strategies.step.trusted import check_elementwise, is_elementwise
from toolkit.strategies.upstream.wrapping import attach
from toolkit.strategies.variables import is_table
from toolkit.support.graphs import outside, same_everywhere

# Optimizer state in shards: for a replicated layer, each replica keeps the slots of its part.
#
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, stage 1:
# gradients are summed by a reduce-scatter, so that each replica has the sum of its part; it updates that part of the
# weights with its part of the slots, and an all-gather brings the weights together: as many bytes as an all-reduce.
#
# A part is a stretch of the flattened variable, which optimizers that look at elements don't notice. Those that look at
# layers as a whole are refused.


def shards_slots(optimizer: Any, variable: Any, name: str | None) -> bool:
    """Returns whether an optimizer's slot of this name is sharded for a variable.

    Raises:
        StrategyError: It is asked for, and the optimizer isn't known to update each element by itself.
    """
    strategy = optimizer._distribution_strategy
    if options_of(strategy).optimizer_state == "replicated" or replica_count(strategy) == 1:
        return False
    check_elementwise(
        optimizer,
        asked="optimizer_state='sharded'",
        found="its update of a weight may depend on the whole layer",
        option="optimizer_state",
    )
    # Averages may become everyone's weights at the next step. The slots of a table in parts would take whole gradients
    # in the place of rows, and an exchange of the whole table: more memory and time than they save.
    return isinstance(variable, keras.Variable) and name != "average" and not is_table(variable.name)


def make_part_of_slot(
    optimizer: Any, reference: keras.Variable, name: str | None, initializer: Any
) -> ReplicaShardedVariable:
    """Creates a sharded slot for a replicated variable, and records that its update is sharded."""
    optimizer.__dict__.setdefault("_toolkit_in_parts", set()).add(optimizer._var_key(reference))
    return make_slot(optimizer, reference, name, initializer, Layout(axis=None, among=Among.ALL, repeats=True))


def make_slot(
    optimizer: Any, reference: keras.Variable, name: str | None, initializer: Any, layout: Layout
) -> ReplicaShardedVariable:
    """Creates a slot of which replicas have shards.

    Args:
        optimizer: A Keras optimizer.
        reference: The variable that it is for.
        name: The slot's.
        initializer: As for `add_variable_from_reference`.
        layout: How it lies.
    """

    def make() -> ReplicaShardedVariable:
        return ReplicaShardedVariable(
            keras.initializers.get(initializer),
            tuple(reference.shape),
            layout=layout,
            dtype=reference.dtype,
            trainable=False,
            name=f"{reference.path}_{name}".replace("/", "_"),
        )

    return track_slot(optimizer, make)


def track_slot(optimizer: Any, make: Callable[[], Any]) -> Any:
    """Returns a slot that a function creates, as one of the optimizer's variables."""
    slot = make_in_scope(optimizer, make)
    optimizer._track_variable(slot)
    return slot


def make_in_scope(optimizer: Any, make: Callable[[], Any]) -> Any:
    """Returns what a function creates in the scope of an optimizer's strategy, and under its name."""

    def inside() -> Any:
        with optimizer._distribution_strategy.scope(), keras.name_scope(optimizer.name):
            return make()

    # The user's own loop may be the first to use an optimizer, in a replica of a step.
    return inside() if tf.distribute.in_cross_replica_context() else outside(inside)


def is_in_parts(optimizer: Any, variable: Any) -> bool:
    """Returns whether each replica updates only its part of a variable."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    in_parts = optimizer.__dict__.get("_toolkit_in_parts")
    return bool(in_parts) and optimizer._var_key(variable) in in_parts


class Shards(Exchange):
    """The gradient of a shard is summed over the groups that hold it: each has that of its own examples."""

    at_tape = True

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Those of sharded variables."""
        variables = self.sent.variables  # As `layout_of`, without a call for each gradient of a replicated model.
        return [number for number in numbers if getattr(variables[number], "laid_out", REPLICATED).in_shards]

    def run(self) -> None:
        """Sums them."""
        values, several = self.sent.values, collectives.replica_id_and_count(Among.PEERS)[1] > 1
        for number in self.numbers:
            variable = self.sent.variables[number]
            if is_of_whole(values[number], variable):  # From no tape: this replica's.
                (whole,) = self.sent.of_shares([number])
                values[number] = variable.scatter(tf.convert_to_tensor(whole), sent_as())
            if several and layout_of(variable).among is Among.GROUP:
                values[number] = self._total(values[number], sent_as())

    def _total(self, gradient: Any, dtype: tf.DType | None) -> Any:
        if not isinstance(gradient, tf.IndexedSlices) or same_everywhere(gradient.indices):
            return mapped(gradient, lambda values: collectives.all_reduce(values, among=Among.PEERS, dtype=dtype))
        return rows_of_replicas(gradient, Among.PEERS, dtype)


class ScatteredSum(Exchange):
    """Each replica gets its part of the sum, flat, which is the part that it updates."""

    @staticmethod
    def begin(optimizer: Any) -> bool:
        """Makes an optimizer keep slots in parts, if its strategy shards them."""
        sharded = options_of(optimizer._distribution_strategy).optimizer_state == "sharded"
        if sharded:
            keep_in_shards(optimizer)
        return sharded

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Those of variables whose slots are in parts, but not of a table's rows."""
        values = self.sent.values
        return [
            number for number in numbers if self._is_cut(number) and not isinstance(values[number], tf.IndexedSlices)
        ]

    def _is_cut(self, number: int) -> bool:
        return is_in_parts(self.sent.optimizer, self.sent.variables[number])

    def end(self) -> None:
        """Leaves this replica's part of what other exchanges have summed whole."""
        for number, value in enumerate(self.sent.values):
            if value is not None and number not in self.numbers and self._is_cut(number):
                self.sent.values[number] = own_part(value, self.sent.variables[number])

    def run(self) -> None:
        """Sums them in packs, of which few are in memory at a time."""
        for number in self.numbers:  # TensorFlow knows no shape of a gradient of a layer on texts of any length.
            self.sent.values[number] = tf.ensure_shape(self.sent.values[number], self.sent.variables[number].shape)
        rows = [_rows(gradient, this_step.count) for gradient in self.sent.of_shares(self.numbers)]
        out: dict[int, tf.Tensor] = {}
        for places in _packs(rows):
            joined = rows[places[0]] if len(places) == 1 else tf.concat([rows[place] for place in places], 1)
            part = collectives.reduce_scatter(joined, among=Among.ALL, dtype=sent_as())
            parts = tf.split(part, [rows[place].shape[1] for place in places])
            out.update(zip(places, parts, strict=True))
        self.sent.complete(self.numbers, [out[place] for place in range(len(rows))])


class Parts:
    """This replica's parts of variables, while an optimizer updates them.

    Args:
        optimizer: A Keras optimizer.
        variables: Those that are cut.
        in_branch: Whether updates are made in a branch, out of which no tensor comes.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], *, in_branch: bool) -> None:
        self.each = [_Part(optimizer, variable, in_branch=in_branch) for variable in variables]

    def bring_together(self) -> None:
        """Sets every replica's copies from all replicas' parts. Later calls do nothing."""
        each, self.each = self.each, []
        values = [tf.convert_to_tensor(part) for part in each]
        for numbers in _packs(values):
            joined = tf.concat([values[number] for number in numbers], 0) if len(numbers) > 1 else values[numbers[0]]
            everybodys = collectives.all_gather(joined, among=Among.ALL)
            sizes = [values[number].shape[0] for number in numbers]
            for number, whole in zip(numbers, tf.split(everybodys, sizes, axis=1), strict=True):
                each[number].set_whole(tf.reshape(whole, [-1]))


class _Part(StandIn):
    """This replica's flat part of a variable, for an optimizer."""

    def __init__(self, optimizer: Any, variable: Any, *, in_branch: bool) -> None:
        strategy = tf.distribute.get_strategy()
        copies = strategy.experimental_local_results(variable.value)
        place, count = this_step.place, this_step.count
        self._copy = copies[place % len(copies)]
        self._whole = variable.shape
        self._size = _size(variable, count)
        self._first = place * self._size
        self._tensor = None if in_branch else self._read()
        self._unique_id = optimizer._var_key(variable)  # By this name Keras finds its slots.
        self.path, self.name = variable.path, variable.name
        self.dtype = self._copy.dtype
        self.shape = tf.TensorShape([self._size])

    def read_value(self) -> tf.Tensor:
        """Returns the current part."""
        return self._read() if self._tensor is None else self._tensor

    def _read(self) -> tf.Tensor:
        flat = tf.reshape(self._copy.read_value(), [-1])
        missing = max(0, self._first + self._size - flat.shape[0])
        part = tf.pad(flat[self._first : self._first + self._size], [[0, missing]])[: self._size]
        part.set_shape([self._size])
        return part

    def assign(self, value: Any) -> None:
        """Sets the part; in a branch, in the replica's copy."""
        value = tf.convert_to_tensor(value)
        if self._tensor is not None:
            self._tensor = value
            return
        flat = tf.reshape(self._copy.read_value(), [-1])
        joined = tf.concat([flat[: self._first], value, flat[self._first + self._size :]], 0)
        self.set_whole(joined)

    scatter_add, scatter_sub = StandIn.assign_add, StandIn.assign_sub  # Of some elements.

    def set_whole(self, flat: tf.Tensor) -> None:
        """Sets the replica's copy to a flat whole, padded or not."""
        size = self._copy.shape.num_elements()
        self._copy.assign(tf.reshape(flat[:size], self._whole))


def own_part(gradient: Any, variable: Any) -> Any:
    """Returns this replica's flat part of a tensor; of some rows, element by element, [k] of that part."""
    place, count = this_step.place, this_step.count
    size = _size(variable, count)
    if not isinstance(gradient, tf.IndexedSlices):
        # TensorFlow knows no shape of a gradient of a layer on texts of any length.
        return _rows(tf.ensure_shape(gradient, variable.shape), count)[place]
    columns = _elements(variable) // variable.shape[0]
    first = tf.cast(gradient.indices, tf.int64)[:, None] * columns + tf.range(columns, dtype=tf.int64)
    own = tf.reshape(first, [-1]) - place * size
    kept = (own >= 0) & (own < size)
    values = tf.boolean_mask(tf.reshape(gradient.values, [-1]), kept)
    return tf.IndexedSlices(values, tf.boolean_mask(own, kept), tf.constant([size], tf.int64))


def _elements(variable: Any) -> int:
    return tf.TensorShape(variable.shape).num_elements()


def _size(variable: Any, count: int) -> int:
    return -(-_elements(variable) // count)


def _rows(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Returns a tensor flat and padded, with a row for each replica."""
    flat = tf.reshape(tensor, [-1])
    size = -(-flat.shape[0] // count)
    return tf.reshape(tf.pad(flat, [[0, size * count - flat.shape[0]]]), [count, size])


def _packs(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Divides tensors into packs of one dtype each: as those of a plain sum, by `bytes_per_pack`."""
    limit = this_step.options.gradients.bytes_per_pack
    found: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(number)
    return [
        [numbers[place] for place in pack]
        for dtype, numbers in found.items()
        for pack in overlap.packed(
            [tensors[number].shape.num_elements() * dtype.size for number in numbers],
            overlap.BYTES_PER_PACK if limit is None else limit,
        )
    ]


# What an optimizer needs for sharded variables: norms, whole values, and slots in shards.
#
# Gradients have been exchanged when it comes to this (see `optimizer`). Keras has no public hook for it: the methods of
# `keras.optimizers.Optimizer` that an optimizer has of its own here stand in `keep_in_shards`.


def keep_in_shards(optimizer: Any) -> None:
    """Makes an optimizer of several replicas keep slots for sharded variables, and train them."""
    attach(
        optimizer,
        add_variable_from_reference=_slot,
        _var_key=_key,
        _backend_apply_gradients=_apply_shards,
        _clip_gradients=_clip,
        _update_model_variables_moving_average=_average,
    )


def _key(original: Callable, optimizer: Any, variable: Any) -> Any:
    with by_shard():
        return original(optimizer, variable)


def by_shard() -> contextlib.AbstractContextManager[None]:
    """A context in which weights that steps use whole read as this replica's shards."""
    return this_step.having(by_shard=True)


def _apply_shards(original: Callable, optimizer: Any, grads: Sequence, variables: Sequence) -> None:
    """Gathers shards for an optimizer that needs whole variables, and the norms by which others clip.

    Of variables whose slots are sharded over all replicas, it is given this replica's parts, which come together then.
    """
    sharded = [layout_of(variable).in_shards for variable in variables]
    in_parts = [is_in_parts(optimizer, variable) for variable in variables]
    if not any(sharded + in_parts) or this_step.count == 1:
        original(optimizer, grads, variables)
        return
    with by_shard():
        _update_shards(original, optimizer, grads, variables, sharded, in_parts)


def _update_shards(
    original: Callable,
    optimizer: Any,
    grads: Sequence,
    variables: Sequence,
    sharded: Sequence[bool],
    in_parts: Sequence[bool],
) -> None:
    if not is_elementwise(optimizer):
        # Each replica has all slots of what is gathered.
        grads = [
            v.gather(tf.convert_to_tensor(g)) if is_shard else g
            for g, v, is_shard in zip(grads, variables, sharded, strict=True)
        ]
        variables = [_Whole(v) if is_shard else v for v, is_shard in zip(variables, sharded, strict=True)]
        original(optimizer, grads, variables)
        return
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    squares = _squares(_to_be_clipped(optimizer, grads, variables), sharded, in_parts) if clips else None
    in_branch = bool(optimizer.gradient_accumulation_steps)
    parts = Parts(optimizer, list(itertools.compress(variables, in_parts)), in_branch=in_branch)
    part = iter(parts.each)
    with this_step.having(squares=squares, parts=parts):
        original(optimizer, grads, [next(part) if flag else v for v, flag in zip(variables, in_parts, strict=True)])
        parts.bring_together()


def _average(original: Callable, optimizer: Any, *args: Any) -> None:
    """Makes averages those of whole weights."""
    if this_step.parts is not None:
        this_step.parts.bring_together()
    original(optimizer, *args)


def _to_be_clipped(optimizer: Any, grads: Sequence, variables: Sequence) -> Sequence:
    """Returns the gradients that Keras will clip. With accumulation, it clips in a branch, without exchanges."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return grads
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]
    return [(gradient + total) / steps for gradient, total in zip(grads, sums, strict=True)]


def _squares(grads: Sequence, sharded: Sequence[bool], in_parts: Sequence[bool]) -> list:
    """Returns each whole gradient's sum of squares: of shards the group's, of parts all replicas'."""
    squares = [_square(gradient) for gradient in grads]
    widest = max((each.dtype for each in squares), key=lambda dtype: dtype.size)
    squares = [tf.cast(each, widest) for each in squares]
    return _added(_added(squares, sharded, Among.GROUP), in_parts, Among.ALL)


def _added(squares: Sequence, chosen: Sequence[bool], among: Among) -> list:
    """Returns sums, the chosen ones over several replicas, with one exchange for all."""
    if not any(chosen):
        return list(squares)
    totals = collectives.all_reduce(tf.stack(list(itertools.compress(squares, chosen))), among=among)
    whole = iter(tf.unstack(totals))
    return [next(whole) if summed else square for square, summed in zip(squares, chosen, strict=True)]


def _square(gradient: Any) -> tf.Tensor:
    values = values_of(gradient)
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32 if values.dtype.size < 4 else values.dtype)))


def _clip(original: Callable, optimizer: Any, grads: Sequence) -> Sequence:
    """Clips by the norms of whole variables if some are sharded, in Keras's ways."""
    squares = this_step.squares
    if squares is None:
        return original(optimizer, grads)
    most, norms = optimizer.clipnorm, [tf.sqrt(square) for square in squares]
    if not most:
        most, norms = optimizer.global_clipnorm, [tf.sqrt(tf.add_n(squares))] * len(squares)
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]  # It adds rows that are named twice.
    scales = [most / tf.maximum(norm, most) for norm in norms]
    return [
        mapped(gradient, lambda values, scale=scale: values * tf.cast(scale, values.dtype))
        for gradient, scale in zip(grads, scales, strict=True)
    ]


class _Whole(StandIn):
    """A sharded variable for an optimizer that needs all of it."""

    def __init__(self, variable: ReplicaShardedVariable) -> None:
        self.variable = variable
        self.path, self.name = variable.path, variable.name
        self.dtype = variable._value.dtype
        self.shape = tf.TensorShape(variable.shape)
        self._unique_id = variable._value._unique_id  # By this name Keras finds its slots.
        self._tensor = variable.gather(tf.convert_to_tensor(variable._value))

    def read_value(self) -> tf.Tensor:
        return self._tensor

    def assign(self, value: tf.Tensor) -> None:
        self._tensor = value
        self.variable._value.assign(self.variable.shard_of(value))


def _slot(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Shards the slots of a sharded variable, such as its momentum, in the same way, and other slots if asked to."""
    with by_shard():  # Where the original places a whole slot.
        return _make_slot(
            lambda: original(optimizer, reference_variable, *args, **kwargs),
            optimizer,
            reference_variable,
            *args,
            **kwargs,
        )


def _make_slot(
    original: Callable, optimizer: Any, reference: Any, name: str | None = None, initializer: Any = "zeros"
) -> Any:
    if not layout_of(reference).in_shards:
        sharded = shards_slots(optimizer, reference, name)
        return make_part_of_slot(optimizer, reference, name, initializer) if sharded else original()
    if not is_elementwise(optimizer) and name != "average":
        return original()
    # An average replaces weights, which are padded with zeros.
    layout = dataclasses.replace(reference.laid_out, used_whole=False, repeats=name != "average")
    return make_slot(optimizer, reference, name, initializer, layout)


def finite_alike(grads: list, variables: Sequence, optimizer: Any) -> list:
    """Makes all replicas come to the same answer if a shard has overflowed: each one's gradients show it."""
    shards = [
        gradient
        for gradient, variable in zip(grads, variables, strict=True)
        if gradient is not None and (is_in_parts(optimizer, variable) or layout_of(variable).in_shards)
    ]
    if not shards:
        return grads
    trace = tf.add_n([tf.reduce_sum(tf.cast(values_of(gradient), tf.float32) * 0.0) for gradient in shards])
    first = next(number for number, gradient in enumerate(grads) if gradient is not None)
    poison = collectives.all_reduce(trace)  # 0, or not a number.
    grads[first] = mapped(grads[first], lambda values: values + tf.cast(poison, values.dtype))
    return grads
