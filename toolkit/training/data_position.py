"""Brings a user's data to the position of training, so that a resumed run gets the batches that would have followed.

There are three ways, and the first that the data allows is taken:

    function of the step   `toolkit.data.Batches`: it begins at any step by itself, and nothing here is asked
    saved iterator         a tf.data iterator, where `fit` reads it on one device: its state, with the contents of
                           shuffle buffers, is part of each checkpoint
    passing over           anything else is read again from its beginning, and the batches already trained on are
                           thrown away; that is exact where the data comes in the same order again

Shuffles of tf.data draw a seed for each iterator, from a generator that all iterators of a dataset share: to make and
drop as many iterators as Keras had made brings that generator to where it was.
"""

import logging
import pathlib
import tempfile
import types
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import DataError, ModelError
from toolkit.strategies.fit import building
from toolkit.strategies.mesh import is_toolkit_strategy
from toolkit.strategies.pipelines import draws_of, in_the_order_of_threads
from toolkit.training.checkpoints import Position

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20  # The key of an iterator in a checkpoint.
_PREFIX = "data/"
_GENERATOR = b"@@num_random_samples"  # tensorflow/core/kernels/data/shuffle_dataset_op.cc
_NO_SEED = 87654321  # TensorFlow's value for a global seed that isn't set (its DEFAULT_GRAPH_SEED).


class DataPosition:
    """The position in a user's training data: captured for each checkpoint, and restored on resume.

    Args:
        data: What is given to `fit` as `x`.
        steps_per_epoch: The batches that `fit` reads in an epoch, where it is given their number. Where that is None,
            Keras reads the data from its beginning in each epoch; otherwise it reads on where the last has stopped.
        strategy: Under which `fit` reads it; None on one device without a strategy, where its iterators can be saved.
        as_it_is: False where Keras makes another dataset of this one, as for class weights.

    Attributes:
        random_state: What becomes of Python's and NumPy's random state on resume. "restored" as it was at the
            checkpoint; "restored at the epoch's begin" where reading an epoch draws from it; "replayed" where all
            batches are drawn again from the script's own seed.
        iterator: Keras's, which reads the data now.
    """

    def __init__(
        self,
        data: Any,
        *,
        steps_per_epoch: int | None,
        strategy: "tf.distribute.Strategy | None" = None,
        as_it_is: bool = True,
    ) -> None:
        self._data = data
        self._steps_per_epoch = steps_per_epoch
        self._draws = draws_of(data) if isinstance(data, tf.data.Dataset) else []
        # An iterator's state lacks the random state of its functions, so such data is read again from the beginning.
        self._can_be_saved = strategy is None and as_it_is and isinstance(data, tf.data.Dataset) and not self._draws
        # To build the model, Keras makes one more iterator before the first epoch, unless our strategies do it.
        self._made_to_build = int(strategy is not None and not is_toolkit_strategy(strategy))
        self.iterator: Any = None
        self._saved: dict[str, np.ndarray] = {}
        self._generators: int | None = None  # Of shuffles, in the state of an iterator that has read nothing yet.
        self._to_pass = 0
        self._resumed = Position()
        self._length: int | None = None  # Of a PyDataset at the checkpoint; None for anything else.
        self._used = False
        self.random_state = "restored"
        if isinstance(data, keras.utils.PyDataset):
            self.random_state = "restored at the epoch's begin"
        elif isinstance(data, types.GeneratorType):
            self.random_state = "replayed"

    def capture(self, position: Position) -> "tuple[dict[str, Any], dict[str, np.ndarray]]":
        """Returns what is needed to find this position again: JSON values, and arrays by name.

        Args:
            position: Where training stands.
        """
        used = self._read_before(position)[1] > 0  # Otherwise the next step would begin with a new iterator.
        facts: dict[str, Any] = {"seed": _global_seed(), "made_to_build": self._made_to_build}
        if self._can_be_saved:
            facts["dataset"] = repr(self._data)
        if isinstance(self._data, keras.utils.PyDataset):
            facts["batches"] = self._data.num_batches
        return facts, self._iterator_state() if used else {}

    def prepare(self, resumed: Position, facts: Mapping[str, Any], arrays: "Mapping[str, np.ndarray]") -> None:
        """Prepares the position before `fit` makes its iterators; called only on resume.

        Args:
            resumed: Where training goes on.
            facts: The first of what `capture` has returned.
            arrays: All arrays of the checkpoint, those that `capture` has returned among them.

        Raises:
            DataError: The data is another pipeline than the one whose iterator was saved.
        """
        if self._can_be_saved:
            self._saved = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
        self._resumed, self._length = resumed, facts.get("batches")
        iterators, self._to_pass = self._read_before(resumed)
        if self._saved:
            if facts.get("dataset") != repr(self._data):
                raise DataError(
                    asked="the run continues with the tf.data iterator that its checkpoint holds",
                    found=f"that iterator reads {facts.get('dataset')}, and fit was given {self._data!r}",
                    remedy="Resume with the data that the run was started with",
                )
            return
        if isinstance(self._data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
            # A run that continues under another strategy.
            iterators += facts.get("made_to_build", self._made_to_build) - self._made_to_build
            for _ in range(iterators):
                iter(self._data)
        if self.random_state == "restored":
            self._warn(facts.get("seed"))

    def begin(self) -> None:
        """Has a PyDataset see the epochs before this position, when `fit` begins to train.

        Not before: the length that `fit` finds first is how many batches it reads at most in each epoch.
        """
        if isinstance(self._data, keras.utils.PyDataset):
            for _ in range(self._resumed.epoch):
                self._data.on_epoch_begin()
                self._data.on_epoch_end()
            if not self._resumed.batch:
                self._check_length()

    def use(self, iterator: Any) -> None:
        """Notes an iterator of Keras's before its first step, and brings the first one to this position.

        Raises:
            DataError: The data has come to its end before that place.
        """
        self.iterator, draws, self._draws = iterator, self._draws, []
        if draws and (words := in_the_order_of_threads(draws)):  # Logged before the first step.
            _LOG.warning("%s", words)
        if self._can_be_saved and self._generators is None:
            self._generators = _generators_in(self._iterator_state())
        if self._used or not self._to_pass:
            return
        self._used = True
        self._check_length()
        if self._saved:
            self._restore(iterator)
            return
        if isinstance(self._data, types.GeneratorType) and self._made_to_build:
            _LOG.warning(
                "A Python generator can't be read again exactly: to build a model under a strategy of TensorFlow's, "
                "Keras reads batches and discards them. Weights will differ from those of an uninterrupted run. "
                "Give fit a tf.data.Dataset or a keras.utils.PyDataset"
            )
        _LOG.info("Reading the data again: skipping %d batches that were trained on before", self._to_pass)
        for number in range(self._to_pass):
            try:
                next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise DataError(
                    asked=f"training continues after {self._to_pass} batches of the data",
                    found=f"it has only {number}",
                    remedy="Resume with the data that the run was started with",
                ) from None

    def _read_before(self, resumed: Position) -> tuple[int, int]:
        """Returns how many iterators Keras has made before the current one, and how many batches that one has given.

        This is what `keras.src.trainers.epoch_iterator` does, which has no public face;
        tests/training/test_data_position.py fails when it changes.
        """
        length, steps = self._cardinality(), self._steps_per_epoch
        # If Keras knows the length, it makes one more iterator at the end of each epoch and doesn't use it.
        if steps is None:
            return (1 if length is None else 2) * resumed.epoch, resumed.batch
        iterators = read = 0
        for _ in range(resumed.epoch):
            read += steps
            if length is not None and read >= length:
                iterators, read = iterators + 1, 0
        return iterators, read + resumed.batch

    def _cardinality(self) -> int | None:
        cardinality = getattr(self._data, "cardinality", -1)
        length = int(cardinality() if callable(cardinality) else cardinality)
        return length if length >= 0 else None

    def _iterator_state(self) -> "dict[str, np.ndarray]":
        if not self._can_be_saved or not isinstance(self.iterator, tf.data.Iterator):
            return {}
        with tempfile.TemporaryDirectory(prefix="toolkit-iterator-") as folder:
            try:
                tf.train.Checkpoint(iterator=self.iterator).write(f"{folder}/state")
            # Python generators, for example, have no state that can be saved.
            except (tf.errors.OpError, NotImplementedError) as error:
                _LOG.debug("The iterator can't be saved, and will be read again on resume (%s)", error)
                self._can_be_saved = False
                return {}
            state = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
        size = sum(map(len, state.values()))
        if size > _MOST_BYTES:
            _LOG.warning(
                "The data's iterator takes %.0f MB, most of it a shuffle buffer: checkpoints leave it out. A resumed "
                "run reads the data again up to its place; call keras.utils.set_random_seed to get the same order",
                size / 1e6,
            )
            self._can_be_saved = False
            return {}
        arrays = {f"{_PREFIX}{name}": np.frombuffer(content, np.uint8) for name, content in state.items()}
        if _generators_in(arrays) < (self._generators or 0):
            # tf.data has read ahead to the end of the data, and an iterator at its end has no state: the next epoch
            # would come in another order. Reading the data again is exact.
            return {}
        return arrays

    def _restore(self, iterator: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="toolkit-iterator-") as folder:
            for name, array in self._saved.items():
                (pathlib.Path(folder) / name.removeprefix(_PREFIX)).write_bytes(array.tobytes())
            tf.train.Checkpoint(iterator=iterator).read(f"{folder}/state").assert_consumed()

    def _check_length(self) -> None:
        if self._length is not None and self._data.num_batches != self._length:
            _LOG.warning(
                "The data has %s batches now and had %s at the checkpoint, so weights will differ from those of an "
                "uninterrupted run. Let the length of %s depend only on its on_epoch_begin and on_epoch_end: resuming "
                "calls these as often as the run had",
                self._data.num_batches,
                self._length,
                type(self._data).__name__,
            )

    def _warn(self, seed: int | None) -> None:
        now = _global_seed()
        if seed is None or now is None or seed != now:
            _LOG.warning(
                "The run began with %s and resumes with %s, so its data is shuffled in another order and its weights "
                "will differ from those of an uninterrupted run. Call keras.utils.set_random_seed first in the script",
                "no random seed" if seed is None else f"random seed {seed}",
                "none" if now is None else f"{now}",
            )


def _generators_in(arrays: "Mapping[str, np.ndarray]") -> int:
    """Returns how many shuffles' generators an iterator's state holds, by tf.data's names."""
    return sum(array.tobytes().count(_GENERATOR) for array in arrays.values())


def _global_seed() -> int | None:
    seed = tf.compat.v1.get_seed(0)[0]
    return None if seed == _NO_SEED else int(seed)


def batch_size_of(data: Any, batch_size: int | None) -> int | None:
    """Returns the examples in each step, over all replicas; None if only reading the data tells.

    Args:
        data: What is given to `fit` as `x`.
        batch_size: What is given to `fit` for it.
    """
    if hasattr(data, "global_batch_size"):
        return data.global_batch_size
    if isinstance(data, tf.data.Dataset):
        shapes = [leaf.shape for leaf in tf.nest.flatten(data.element_spec) if hasattr(leaf, "shape")]
        return shapes[0][0] if shapes and shapes[0].rank else None
    return (batch_size or 32) if _is_arrays(data) else None  # Keras's own default.


def shuffled_by_keras(data: Any) -> bool:
    """Returns whether `fit` can shuffle this data, which it does by default."""
    return isinstance(data, keras.utils.PyDataset) or _is_arrays(data)


def _is_arrays(data: Any) -> bool:
    return any(hasattr(leaf, "__array__") for leaf in tf.nest.flatten(data))


def build(model: keras.Model, data: Any) -> None:
    """Builds a model and its metrics from the shapes of its data, because variables must exist to be restored.

    Args:
        model: A compiled model; what is built already stays as it is.
        data: What is given to `fit` as `x`, or its iterator; or (x, y), where these are arrays.

    Raises:
        ModelError: The data doesn't say its shapes beforehand.
    """
    if isinstance(data, keras.utils.PyDataset):
        data = data[0]
    spec = building.batch_spec(data.element_spec) if hasattr(data, "element_spec") else data
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in tf.nest.flatten(spec)):
        raise ModelError(
            asked=f"model {model.name!r} is to be restored before it has seen data",
            found="it isn't built, and the data doesn't say its shapes beforehand",
            remedy="Begin the model with a keras.Input, or call model.build",
        )
    if _is_arrays(data):  # The first dimension of its batches counts all examples.
        spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), spec)
    building.build(model, spec)
