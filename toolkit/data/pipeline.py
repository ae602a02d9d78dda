"""Pictures with their labels, and global batches of them: shuffled, augmented, a pure function of seed and step.

Step n of training always sees the same pictures, cut and turned the same way, whatever ran before
it: the shuffle is a keyed permutation of the epoch (`tf.random.experimental.index_shuffle`), the
augmentation is drawn from (seed, step). So a resumed run starts its stream at any step, with no
state to save and nothing to skip through.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolkit.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """A data set held in memory.

    Attributes:
        name: The data set's name.
        origin: Where it came from, in words.
        classes: Names of the classes; a label is an index into them.
        train_images: uint8 [N, 32, 32, 3].
        train_labels: int32 [N].
        test_images: uint8 [M, 32, 32, 3].
        test_labels: int32 [M].
    """

    name: str
    origin: str
    classes: tuple[str, ...]
    train_images: "np.ndarray"
    train_labels: "np.ndarray"
    test_images: "np.ndarray"
    test_labels: "np.ndarray"

    def fingerprint(self) -> str:
        """Returns 16 hex digits that differ if the training examples or their order differ."""
        digest = hashlib.sha256(self.train_labels.tobytes())
        digest.update(self.train_images[:: max(1, len(self.train_images) // 256)].tobytes())
        return digest.hexdigest()[:16]


_PAD = 2  # Pixels of black border on each side, into which a crop may reach.
_AHEAD = 4  # How many batches are prepared ahead.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """Divides examples into global batches for the replicas of a strategy.

    Attributes:
        examples: The pictures.
        strategy: Whose replicas share each batch.
        global_batch_size: Examples per step, over all replicas.
        seed: Of the shuffle and the augmentation.
        augment: Crop from a padded picture, and mirror half of them.
        steps_per_epoch: Steps after which `fit` ends an epoch; unless given, those in which every training example is
            seen at most once. The remainder sits that pass out.

    Raises:
        DataError: The batch is not positive, larger than the training set, or can't be shared
            equally among the replicas; or there are fewer test examples than replicas.
    """

    examples: Examples
    strategy: "tf.distribute.Strategy"
    global_batch_size: int
    seed: int = 0
    augment: bool = True
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        size, replicas, count = self.global_batch_size, self.replicas, len(self.examples.train_labels)
        asked = f"global_batch_size={size} asks for {size} examples a step"
        if size < 1:
            raise DataError(
                asked=asked, found="a step needs at least one per replica", remedy=f"Give {replicas} or more"
            )
        if size > count:
            raise DataError(
                asked=asked,
                found=f"there are {count} training examples",
                remedy=f"Give at most {count - count % replicas}",
            )
        if size % replicas:
            below, above = size - size % replicas, size - size % replicas + replicas
            fits = f"{below} or {above}" if below else f"{above}"
            raise DataError(asked=asked, found=f"{replicas} replicas can't share that equally", remedy=f"Give {fits}")
        evaluation_batch_size(len(self.examples.test_labels), size, replicas)
        object.__setattr__(self, "steps_per_epoch", self.steps_per_epoch or self._steps_per_pass)

    @property
    def replicas(self) -> int:
        """Replicas that share a batch."""
        return self.strategy.num_replicas_in_sync

    @property
    def _steps_per_pass(self) -> int:
        return len(self.examples.train_labels) // self.global_batch_size

    def config(self) -> dict[str, Any]:
        """Returns the configuration that must not change on resume, as JSON values."""
        return {
            "dataset": self.examples.name,
            "fingerprint": self.examples.fingerprint(),
            "global_batch_size": self.global_batch_size,
        }

    def train(self, start_step: int = 0) -> Any:
        """Returns an endless distributed dataset of training batches for `fit`.

        Each replica gets its share of (uint8 [global_batch_size, 32, 32, 3], int32 [global_batch_size]).
        Give `fit` a `steps_per_epoch`.
        """
        if hasattr(self.strategy, "numbered"):
            return self.strategy.numbered(self.train_dataset(start_step), self._train_batch, start=start_step)
        return self._distribute(lambda share, shares: self.train_dataset(start_step, share=share, shares=shares))

    def test(self) -> Any:
        """Returns all test examples once, distributed. The last batch may be smaller.

        Every replica gets at least one example of every batch: some layers fail on an empty one.
        """
        if hasattr(self.strategy, "numbered"):
            return self.strategy.numbered(self.test_dataset(), self._test_batch, count=self._test_batches)
        return self._distribute(lambda share, shares: self.test_dataset(share=share, shares=shares))

    def train_dataset(self, start_step: int = 0, *, share: int = 0, shares: int = 1) -> "tf.data.Dataset":
        """As `train`, for one of `shares` equal shares of each global batch, numbered from 0."""
        import tensorflow as tf

        return _stated(
            tf.data.Dataset.range(start_step, 2**62)
            .map(lambda step: self._train_batch(step, share, shares), num_parallel_calls=2, deterministic=True)
            .prefetch(_AHEAD)
        )

    def test_dataset(self, *, share: int = 0, shares: int = 1) -> "tf.data.Dataset":
        """As `test`, for one of `shares` shares of each batch, equal to within one example."""
        import tensorflow as tf

        return _stated(
            tf.data.Dataset.range(self._test_batches)
            .map(lambda number: self._test_batch(number, share, shares), num_parallel_calls=2)
            .prefetch(_AHEAD)
        )

    def _train_batch(self, step: "tf.Tensor", share: int, shares: int) -> tuple["tf.Tensor", "tf.Tensor"]:
        """Returns a share of a step's batch; step and share may be int64 tensors."""
        import tensorflow as tf

        from toolkit.strategies.batches import row_range

        size, steps, count = self.global_batch_size, self._steps_per_pass, len(self.examples.train_labels)
        mine = slice(*row_range(size, share, shares))
        images, labels = self._constants[:2]
        seed = tf.constant(self.seed, tf.int64)
        epoch, place = step // steps, step % steps
        rows = tf.random.experimental.index_shuffle(
            place * size + tf.range(size, dtype=tf.int64)[mine],
            seed=tf.stack([seed, epoch]),
            max_index=tf.constant(count - 1, tf.int64),
        )
        pictures = tf.gather(images, rows)
        if self.augment:
            # Drawn for the whole batch, so that it doesn't depend on the number of shares.
            drawn = tf.random.stateless_uniform([3, size, 1], tf.stack([seed, step]), maxval=2**30, dtype=tf.int32)
            pictures = _augment(pictures, drawn[:, mine])
        if isinstance(share, int):
            pictures = tf.ensure_shape(pictures, (mine.stop - mine.start, *images.shape[1:]))
        return pictures, tf.gather(labels, rows)

    def _test_batch(self, number: "tf.Tensor", share: int, shares: int) -> tuple["tf.Tensor", "tf.Tensor"]:
        """Returns a share of a test batch, by its number; both may be int64 tensors."""
        import tensorflow as tf

        from toolkit.strategies.batches import row_range

        size, count = self._test_batch_size, len(self.examples.test_labels)
        images, labels = self._constants[2:]
        start, present = number * size, tf.minimum(count - number * size, size)
        first, last = row_range(present, share, shares)
        return images[start + first : start + last], labels[start + first : start + last]

    @property
    def _test_batch_size(self) -> int:
        return evaluation_batch_size(len(self.examples.test_labels), self.global_batch_size, self.replicas)

    @property
    def _test_batches(self) -> int:
        return -(-len(self.examples.test_labels) // self._test_batch_size)

    @functools.cached_property  # Otherwise each replica would copy the pictures.
    def _constants(self) -> tuple["tf.Tensor", ...]:
        import tensorflow as tf

        # They must be no part of a pipeline that is being traced.
        with tf.init_scope(), tf.device("CPU:0"):
            return (
                tf.constant(self.examples.train_images),
                tf.constant(self.examples.train_labels),
                tf.constant(self.examples.test_images),
                tf.constant(self.examples.test_labels),
            )

    def _distribute(self, make: Callable[[int, int], "tf.data.Dataset"]) -> Any:
        import tensorflow as tf

        if self.replicas == 1:
            return make(0, 1)
        if not isinstance(self.strategy, tf.distribute.MirroredStrategy):
            return self.strategy.distribute_datasets_from_function(lambda context: self._worker(make, context))
        # With a pipeline for each replica, each makes only its share. TensorFlow's own iterator between a pipeline
        # and several devices has a tuning thread (see `untuned`) that can't be switched off.
        options = tf.distribute.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        )
        return self.strategy.distribute_datasets_from_function(
            lambda context: make(context.input_pipeline_id, context.num_input_pipelines), options
        )

    def _worker(self, make: Callable[[int, int], "tf.data.Dataset"], context: Any) -> "tf.data.Dataset":
        """Returns one worker's shares, for its replicas in turn."""
        import tensorflow as tf

        from toolkit.strategies.batches import shares_of_worker

        parts = [make(share, self.replicas) for share in shares_of_worker(context)]
        if len(parts) == 1:
            return parts[0]
        return _stated(tf.data.Dataset.choose_from_datasets(parts, tf.data.Dataset.range(len(parts)).repeat()))


def _stated(dataset: "tf.data.Dataset") -> "tf.data.Dataset":
    """Makes order, sharding and tuning deterministic."""
    import tensorflow as tf

    from toolkit.strategies.pipelines import untuned

    options = tf.data.Options()
    options.deterministic = True
    # If a strategy shards, every worker makes each global batch and keeps its share.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # This pipeline needs no tuning.
    return untuned(dataset.with_options(options))


def evaluation_batch_size(count: int, largest: int, replicas: int) -> int:
    """Returns the largest batch size, up to `largest`, with an example for every replica in the last batch.

    Raises:
        DataError: There are fewer examples than replicas.
    """
    for size in range(min(largest, count), replicas - 1, -1):
        if count % size == 0 or count % size >= replicas:
            return size
    raise DataError(
        asked=f"{count} test examples are to be shared by {replicas} replicas",
        found="some replica would get none",
        remedy=f"Use at least {replicas} test examples, or fewer replicas",
    )


def _augment(pictures: "tf.Tensor", drawn: "tf.Tensor") -> "tf.Tensor":
    """Crops each picture at a random place of its padded self, and mirrors half of them.

    Whole batches at once, by two gathers: an order of magnitude faster than picture by picture.

    Args:
        pictures: uint8 [batch, height, width, channels].
        drawn: Whole random numbers, int32 [3, batch, 1].
    """
    import tensorflow as tf

    height, width = pictures.shape[1], pictures.shape[2]
    down, right = drawn[0] % (2 * _PAD + 1), drawn[1] % (2 * _PAD + 1)
    columns = tf.where(drawn[2] % 2 == 1, tf.range(width)[::-1], tf.range(width))
    padded = tf.pad(pictures, [[0, 0], [_PAD, _PAD], [_PAD, _PAD], [0, 0]])
    rows_cut = tf.gather(padded, down + tf.range(height), axis=1, batch_dims=1)
    return tf.gather(rows_cut, right + columns, axis=2, batch_dims=1)
