"""`Embedding` whose table is sharded over the replicas of a group, by columns or by rows of the vocabulary."""

from typing import Any

import keras
import tensorflow as tf

from toolkit.parallel.layers import base
from toolkit.strategies.mesh import Among
from toolkit.strategies.step import collectives
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.support.graphs import same_everywhere


@keras.saving.register_keras_serializable("toolkit")
class ShardedEmbedding(base.Sharded, keras.layers.Embedding):
    """A `keras.layers.Embedding` whose table is sharded over the replicas.

    Everybody's indices are gathered, which are small. By columns, each replica looks all of them up in some columns,
    and columns go back to the replica whose examples they are; by rows, each looks up those of its rows, and the sums
    of what all have found come back (Shoeybi et al., arXiv 1909.08053, section 3). Elements that each of R replicas
    receives forward, for n examples of t indices: by columns (R-1)/R n t output_dim, by rows (R-1) n t output_dim;
    backward as many. A vocabulary that the replicas don't divide is padded.

    Args:
        input_dim: As for `Embedding`.
        output_dim: As for `Embedding`.
        split: "columns" or "rows".
        exchange_dtype: As for `ShardedDense`.
        args: As for `Embedding`.
        kwargs: As for `Embedding`.

    Raises:
        StrategyError: An argument has an unknown value; or, when the layer is built, the replicas outnumber the rows or
            columns.
    """

    settings = ("split", "exchange_dtype")

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *args: Any,
        split: str = "columns",
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        if split not in ("columns", "rows"):
            base.refuse(f"split={split!r}", "a table has no such split", "Choose columns or rows")
        # First, because Keras builds the layer at once if it is given `weights`.
        self.split = self.planned.get("split", split)
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self._set_exchange_dtype(exchange_dtype)

    def _shard_axis(self, name: str) -> int | None:
        return {"columns": 1, "rows": 0}[self.split] if name == "embeddings" else None

    def call(self, inputs: Any) -> Any:
        if not isinstance(self._embeddings, ReplicaShardedVariable):
            return super().call(inputs)
        indices = tf.cast(inputs, inputs.dtype if inputs.dtype in (tf.int32, tf.int64) else tf.int32)
        if not base.in_a_step():
            return self._looked_up(self._embeddings.whole(), indices)
        indices = tf.where(indices < 0, indices + self.input_dim, indices)  # As in Keras: counted from the end.
        dtype = self._communication_dtype
        if same_everywhere(indices):  # Such as positions in a sequence.
            if self.split == "columns":
                return base.features_of_all(self._in_shard(indices), self.output_dim, dtype=dtype)
            return base.sum_of_all(self._in_shard(indices), dtype=dtype)
        counts = base.count_examples(indices)
        found = self._in_shard(base.gather(indices, counts, dtype=None))
        if self.split == "columns":
            return base.features_to_examples(found, counts, self.output_dim, dtype=dtype)
        return base.sum_to_examples(found, counts, dtype=dtype)

    def _in_shard(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns this replica's shard of some rows: its columns of them, or zeros for rows that it doesn't have."""
        shard = keras.ops.convert_to_tensor(self._embeddings)
        if self.split == "columns":
            return self._looked_up(shard, indices)
        size = self._embeddings.shard_shape[0]
        own = indices - collectives.replica_id_and_count(Among.GROUP)[0] * size
        inside = (own >= 0) & (own < size)
        # An index without a row is refused, or not, as by the plain layer.
        own = tf.where(indices < self.input_dim, tf.clip_by_value(own, 0, size - 1), indices)
        found = self._looked_up(shard, own)
        return tf.where(inside[..., None], found, tf.zeros_like(found))

    def _looked_up(self, table: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        return tf.cast(keras.ops.take(table, indices, axis=0), self.compute_dtype)
