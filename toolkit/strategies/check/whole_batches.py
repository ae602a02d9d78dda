"""The whole batch, as one device would be given it, of which each replica has its part."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.batches import Part, has_shape
from toolkit.strategies.processes.agreement import gather, processes


def whole_batch(strategy: tf.distribute.Strategy, given: Any) -> Any:
    """Returns a batch with the rows of all replicas, in the batch's order. With several processes it is a collective.

    Args:
        strategy: Whose replicas were given it.
        given: What its `run` is given: a `Part`, or any structure; each tensor may be a replica's own.
    """
    with tf.device("CPU:0"):  # No device may have room for it.
        return _whole(strategy, given)


def _whole(strategy: tf.distribute.Strategy, given: Any) -> Any:
    part = given if isinstance(given, Part) else Part(given, None, {})
    leaves, local = tf.nest.flatten(part.batch), len(strategy.extended.worker_devices)
    every = [[_plain(each) for each in _of_each(strategy, leaf, local)] for leaf in leaves]
    own = rows_of(strategy, given)
    mine = [[values[place] for values in every] for place in range(local)]
    if processes(strategy) > 1:
        mine, own = _of_all_processes(strategy, mine, own)
    tables = set(map(int, part.tables))
    whole = [_joined([each[number] for each in mine], own, number in tables) for number in range(len(leaves))]
    return tf.nest.pack_sequence_as(part.batch, whole)


def unsized(spec: Any) -> tuple[bool, ...]:
    """Returns for each component of a distributed batch whether its number of rows isn't known; () without a spec.

    Args:
        spec: The spec of what replicas are given.
    """
    if spec is None:
        return ()

    def one(leaf: Any) -> bool:
        parts = getattr(leaf, "_value_specs", (leaf,))  # Of a PerReplica.
        return any(isinstance(each, tf.TensorSpec) and each.shape.rank and each.shape[0] is None for each in parts)

    return tuple(one(each) for each in tf.nest.flatten(spec.batch if isinstance(spec, Part) else spec))


def rows_of(strategy: tf.distribute.Strategy, given: Any) -> list[int | None]:
    """Returns how many of a batch's examples each replica of this process has; None where all that it has are its own.

    Args:
        strategy: Whose replicas were given it.
        given: As of `whole_batch`.
    """
    local = len(strategy.extended.worker_devices)
    if not isinstance(given, Part) or given.rows is None:
        return [None] * local
    return [int(each) for each in _of_each(strategy, given.rows, local)]


def joined(strategy: tf.distribute.Strategy, mine: list[list], rows: list[int | None]) -> list[tuple[list, Any]]:
    """Joins tensors of replicas; with several processes it is a collective.

    Args:
        strategy: Of the replicas.
        mine: For each replica of this process, its tensors.
        rows: As `rows_of` returns them.

    Returns:
        For each tensor every replica's, in the order of the batch's rows, and their rows joined; None if they can't be.
    """
    if processes(strategy) > 1:
        mine, rows = _of_all_processes(strategy, mine, rows)
    found = []
    for parts in zip(*mine, strict=True):
        try:
            found.append((list(parts), _joined(parts, rows, is_table=False)))
        except tf.errors.InvalidArgumentError:  # They have other shapes but for their rows.
            found.append((list(parts), None))
    return found


def _of_each(strategy: tf.distribute.Strategy, leaf: Any, count: int) -> list:
    """Returns what each replica of this process has."""
    found = strategy.experimental_local_results(leaf)
    return list(found) if len(found) == count else [leaf] * count


def _plain(leaf: Any) -> Any:
    """Returns a tensor, or None for what stands in Keras's batches in the place of labels that aren't there."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return (
        tf.convert_to_tensor(leaf) if has_shape(leaf) and not tf.is_tensor(leaf) else leaf
    )  # Or a script's own value.


def _joined(parts: Sequence[Any], rows: Sequence[int | None], is_table: bool) -> Any:
    if not tf.is_tensor(parts[0]) or is_table or parts[0].shape.rank == 0:
        return parts[0]
    kept = [each for each, count in zip(parts, rows, strict=True) if count is None or count > 0]
    if not kept:
        return parts[0][:0]
    if len(kept) == 1:
        return kept[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, kept, expand_nonconcat_dims=True)
    return tf.concat(kept, 0)


def _of_all_processes(
    strategy: tf.distribute.Strategy, mine: list[list], rows: list[int | None]
) -> tuple[list[list], list[int | None]]:
    """Returns the parts of all replicas of all processes, in the order of the batch's rows."""
    everybodys = [_unpacked(raw, mine) for raw in gather(strategy, _packed(mine, rows))]
    # As `batches.shares_of_worker` deals them: the first of each process, then the second of each.
    places = [(process, place) for place in range(len(mine)) for process in range(len(everybodys))]
    parts = [everybodys[process][0][place] for process, place in places]
    return parts, [everybodys[process][1][place] for process, place in places]


def _packed(mine: list[list], rows: list[int | None]) -> bytes:
    file = io.BytesIO()
    tensors = tf.nest.flatten(mine, expand_composites=True)
    raw = [tf.io.serialize_tensor(each).numpy() if tf.is_tensor(each) else b"" for each in tensors]
    arrays: dict[str, Any] = {str(number): np.frombuffer(each, np.uint8) for number, each in enumerate(raw)}
    np.savez(file, rows=np.array([-1 if each is None else each for each in rows], np.int64), **arrays)
    return file.getvalue()


def _unpacked(raw: bytes, like: list[list]) -> tuple[list[list], list[int | None]]:
    held = np.load(io.BytesIO(raw))
    tensors = tf.nest.flatten(like, expand_composites=True)
    own = [
        tf.io.parse_tensor(held[str(number)].tobytes(), each.dtype) if tf.is_tensor(each) else each
        for number, each in enumerate(tensors)
    ]
    rows = [None if each < 0 else int(each) for each in held["rows"]]
    return tf.nest.pack_sequence_as(like, own, expand_composites=True), rows
