"""Synchronous rounds: the workers share each batch, and their gradients are applied together."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.parameter_servers.ledger import CAPACITY
from toolkit.strategies.parameter_servers.local import Copies, groups, packed, unpacked
from toolkit.strategies.parameter_servers.sharded import Sharded, offsets
from toolkit.strategies.parameter_servers.sources import Stream
from toolkit.strategies.parameter_servers.step import Step, active, changes
from toolkit.strategies.parameter_servers.tracing import Traced, alone, flat, numbers, trace
from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["EXAMPLES", "Rounds", "shares_of"]

EXAMPLES = "/examples"  # Among the logs of a share: how many it holds.


class Rounds:
    """Synchronous steps: workers leave the gradients of their shares on the ps, where they are applied together.

    What a worker leaves lies in a row of its share's own, so a share that is computed again, because
    its worker died, changes nothing.

    Args:
        variables: Of the model.
        shares: Of each batch.
    """

    def __init__(self, variables: Variables, shares: int) -> None:
        self.variables = variables
        self.shares = shares
        self._rows: dict[Any, list[tf.Variable]] = {}
        self._order: list[tuple] = []  # (variable's value, whether it has a gradient), as the optimizer got them.
        self._others: dict[str, list] = {}

    def share(self, batches: Callable, *, signature: Sequence[Any]) -> Traced:
        """Makes the function of one share, as `training`, with the share's number for the place.

        Args:
            batches: Takes the number of the batch, that of the share, and data.
            signature: Of the data.
        """
        variables = self.variables
        model = variables.model
        assigned: list[int] = []

        def replica(first: tf.Tensor, share: tf.Tensor, counting: list, data: Any) -> tuple:
            values, _ = variables.pull()
            sums = [tf.zeros(v.shape, v.dtype) for v in variables.metrics]
            copies = Copies([*variables.held, *variables.counting, *variables.metrics], [*values, *counting, *sums])
            batch = batches(first, share, data)
            active.step = _Leaving(self, share)
            try:
                with copies:
                    logs = model.train_step(batch)
            finally:
                active.step = None
            if not self._order:
                raise StrategyError(
                    asked="a synchronous round applies the gradients of one train_step",
                    found="this model's train_step applies none",
                    remedy="Call the optimizer's apply or apply_gradients in it",
                )
            self._others = changes(variables, copies, values, None)
            for device, pairs in self._others.items():
                self._leave("others", device, [change for change, _ in pairs], share)
            # The optimizer's count of steps moves when the round is applied.
            steps = model.optimizer.iterations
            assigned[:] = [1 if v is steps else copies.assigned.get(id(v), 0) for v in variables.counting]
            examples = tf.shape(next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None))[0]
            sums = [copies.values[id(v)] for v in variables.metrics]
            return flat(sums), {**numbers(logs), EXAMPLES: tf.cast(examples, tf.float64)}

        return trace(variables, replica, signature, assigned)

    def applying(self) -> Any:
        """Makes the function, run by the chief, that applies a round: (weights of the shares, place, counting)."""
        variables = self.variables
        model = variables.model

        def replica(weights: tf.Tensor, place: tf.Tensor, counting: list) -> None:
            versions, places = {}, {}
            for device, ledger in variables.ledgers.items():
                versions[device] = ledger.version()
                with tf.device(device):
                    places[device] = place % CAPACITY
            for device, pairs in self._others.items():
                for (_, assign), change in zip(pairs, self._mean("others", device, pairs, weights), strict=True):
                    with tf.device(device):
                        assign(change)
            copies = Copies(variables.counting, counting)
            step = _Round(variables, copies, versions, places, None)
            step.parts = self._means(weights)
            whole = model.optimizer.clipnorm or model.optimizer.global_clipnorm or model.optimizer.clipvalue
            grads = [
                None if not there else step.whole(value) if whole else tf.zeros([], value.dtype)
                for value, there in self._order
            ]
            step.given = bool(whole)
            active.step = step
            try:
                with copies:
                    model.optimizer.apply(grads, model.trainable_variables)
            finally:
                active.step = None

        strategy = model.distribute_strategy
        counting = [tf.TensorSpec(v.shape, v.dtype) for v in variables.counting]

        @tf.function(input_signature=[tf.TensorSpec([self.shares], tf.float64), tf.TensorSpec([], tf.int64), counting])
        @tf.autograph.experimental.do_not_convert
        def run(weights: tf.Tensor, place: tf.Tensor, counting: list) -> None:
            with alone(strategy):
                replica(weights, place, counting)

        return run.get_concrete_function()

    def left(self, grads: Sequence[Any], values: Sequence[Any], share: tf.Tensor) -> None:
        """Leaves a share's gradients on the ps."""
        self._order = [(value, gradient is not None) for gradient, value in zip(grads, values, strict=True)]
        by_value = {id(value): gradient for gradient, value in zip(grads, values, strict=True)}
        for device, pieces in self._by_device().items():
            mine = []
            for value, number in pieces:
                gradient = tf.convert_to_tensor(by_value[id(value)])
                mine.append(value.rows(gradient, number) if isinstance(value, Sharded) else gradient)
            self._leave("gradients", device, mine, share)

    def _by_device(self) -> dict[str, list[tuple]]:
        """Returns (variable's value, number of its part) on each device, of those that have gradients."""
        devices: dict[str, list[tuple]] = {}
        for value, there in self._order:
            for number, part in enumerate(getattr(value, "parts", [value])):
                if there:
                    devices.setdefault(part.device, []).append((value, number))
        return devices

    def _leave(self, kind: str, device: str, pieces: Sequence[tf.Tensor], share: tf.Tensor) -> None:
        sent = packed(pieces)
        if (kind, device) not in self._rows:
            beside = next(part for part in self.variables.pieces(self.variables.held) if part.device == device)
            strategy = self.variables.model.distribute_strategy
            with tf.init_scope(), strategy.extended.colocate_vars_with(beside):
                self._rows[kind, device] = [
                    tf.Variable(tf.zeros([self.shares, each.shape.num_elements()], each.dtype), trainable=False)
                    for each in sent
                ]
        for each, rows in zip(sent, self._rows[kind, device], strict=True):
            with tf.device(device):
                mine = tf.reshape(tf.identity(each), [1, -1])
                rows.scatter_update(tf.IndexedSlices(values=mine, indices=tf.reshape(tf.identity(share), [1])))

    def _mean(self, kind: str, device: str, like: Sequence[Any], weights: tf.Tensor) -> list[tf.Tensor]:
        """Returns the weighted mean of what the shares left, on the ps."""
        like = [piece[0] for piece in like]
        with tf.device(device):
            means = []
            for rows in self._rows[kind, device]:
                value = rows.read_value()
                wanted = tf.cast(tf.identity(weights), value.dtype if value.dtype.is_floating else tf.float64)
                mean = tf.tensordot(wanted, tf.cast(value, wanted.dtype), 1)
                means.append(tf.cast(mean, value.dtype))
            shapes = [tf.TensorSpec(piece.shape, piece.dtype) for piece in like]
            alone = [tf.reshape(f, _only(shapes, number)) for number, f in enumerate(means)]
            return unpacked(alone, shapes)

    def _means(self, weights: tf.Tensor) -> dict[int, dict[int, tf.Tensor]]:
        """Returns the gradient of each variable: its value's id -> number of the part -> tensor, on the ps."""
        found: dict[int, dict[int, tf.Tensor]] = {}
        for device, pieces in self._by_device().items():
            like = [(getattr(value, "parts", [value])[number],) for value, number in pieces]
            for (value, number), mean in zip(pieces, self._mean("gradients", device, like, weights), strict=True):
                found.setdefault(id(value), {})[number] = mean
        return found


class _Leaving:
    """In a share's step, takes gradients that an optimizer is to apply."""

    book = None

    def __init__(self, rounds: Rounds, share: tf.Tensor) -> None:
        self.rounds = rounds
        self.share = share
        self.asked = False

    def apply(self, _original: Callable, optimizer: Any, grads: list, variables: Any) -> Any:
        if self.asked or optimizer is not self.rounds.variables.model.optimizer:
            raise StrategyError(
                asked="a synchronous round applies the gradients of one train_step",
                found="this model's train_step applies several",
                remedy="Train it free-running, or with max_staleness",
            )
        self.asked = True
        variables = list(variables) if variables is not None else list(self.rounds.variables.model.trainable_variables)
        self.rounds.left(grads, [self.rounds.variables.values[id(v)] for v in variables], self.share)


class _Round(Step):
    """The step in which a round is applied: the gradients are on the ps already."""

    parts: dict[int, dict[int, tf.Tensor]]
    given: bool

    def whole(self, value: Any) -> tf.Tensor:
        parts = self.parts[id(value)]
        return tf.concat([parts[number] for number in sorted(parts)], 0) if len(parts) > 1 else parts[0]

    def send(self, grads_and_vars: Sequence[tuple]) -> list[tuple]:
        if self.given:  # Clipped, so they came here.
            return super().send(grads_and_vars)
        out = []
        for gradient, value in grads_and_vars:
            parts = getattr(value, "parts", [value])
            if gradient is None:
                out.append((None, value))
                continue
            for number, part in enumerate(parts):
                mean = self.parts[id(value)][number]
                with tf.device(part.device), tf.control_dependencies([mean]):
                    self.begin(part.device)
                with tf.device(part.device), tf.control_dependencies([self.notes[part.device]]):
                    out.append((tf.identity(mean), part))
        return out


def _only(shapes: Sequence[Any], number: int) -> Any:
    """The shape of a flat tensor: of the one piece that it holds, or as long as it is."""
    together = groups(shapes)[number][1]
    return shapes[together[0]].shape if len(together) == 1 else [-1]


def shares_of(stream: Stream, item: Any, count: int) -> list[tuple[int, list]]:
    """Returns the number of each share that holds examples, and what is sent along with it.

    Args:
        stream: Where the batch comes from.
        item: What its reader took.
        count: Of shares.

    Raises:
        StrategyError: Each worker reads data of its own.
    """
    if stream.kind == "per worker":
        raise StrategyError(
            asked="synchronous rounds with distribute_datasets_from_function",
            found="in a round the workers share one batch, and there each has its own",
            remedy="Give fit one dataset of global batches",
        )
    if stream.kind == "numbered":
        return [(share, []) for share in range(count)]
    ends = offsets(int(item[0].shape[0]), count)
    cuts = enumerate(itertools.pairwise(ends))
    return [(share, [leaf[start:stop] for leaf in item]) for share, (start, stop) in cuts if stop > start]
