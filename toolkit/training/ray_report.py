"""Reports to Ray Train: each epoch's metrics with the model."""

import pathlib
import tempfile
from typing import Any

import keras

from toolkit.errors import RequestError
from toolkit.strategies.multi_worker import MultiWorkerStrategy
from toolkit.training.directory import write_model
from toolkit.training.progress import scalars

MODEL = "model.keras"


class RayReport(keras.callbacks.Callback):
    """Reports to Ray Train, in the train function of a `ray.train.tensorflow.TensorflowTrainer`.

        run.fit(model, dataset, epochs=5, callbacks=[toolkit.training.RayReport()])

    An epoch is reported when all callbacks are done with it, as the next one begins or training ends. A `Run` may still
    be writing its checkpoint then: after a failure the epoch may be trained and reported again. All workers wait for
    one another there. Ray keeps the model in its storage, as `model.keras` in a `ray.train.Checkpoint`. It comes last
    in `callbacks`: behind an EarlyStopping that restores the best weights, which it does as training ends.

    Args:
        every: The model goes with every so many epochs, and with the last; 0 for metrics only.

    Raises:
        RequestError: `every` is negative; as training begins: Ray isn't installed, or didn't start this process, or
            the model doesn't train together with the other workers'.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        if every < 0:
            raise RequestError(
                asked=f"RayReport(every={every})",
                found="a model can go with every epoch or every so many",
                remedy="Give 1 or more, or 0 for metrics only",
            )
        self._every = every
        self._waiting: tuple[int, dict[str, float]] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that this process belongs to a Ray Train job."""
        asked = "RayReport tells Ray Train what training comes to"
        try:
            import ray.train
        except ImportError as error:
            remedy = "Install it: pip install 'ray[train]'"
            raise RequestError(asked=asked, found=f"Ray isn't here ({error})", remedy=remedy) from error
        try:
            context = ray.train.get_context()
            self._rank, workers = context.get_world_rank(), context.get_world_size()
        except Exception as error:  # Ray's own exceptions, which differ by version.
            raise RequestError(
                asked=asked,
                found="this process isn't a worker of Ray Train",
                remedy="Call fit in the train function of a ray.train.tensorflow.TensorflowTrainer, or leave it out",
            ) from error
        if workers > 1 and not isinstance(self.model.distribute_strategy, MultiWorkerStrategy):
            raise RequestError(
                asked=f"Ray has started {workers} workers to train together",
                found=f"the model is built in the scope of {type(self.model.distribute_strategy).__name__}, in which "
                "Keras's fit doesn't train it with the others",
                remedy="Build and compile it in the scope of toolkit.strategies.create()",
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reports the epoch before."""
        self._report(last=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keeps an epoch's metrics until they are reported."""
        self._waiting = (epoch + 1, scalars(logs))

    def on_train_end(self, logs: Any = None) -> None:
        """Reports the last epoch."""
        self._report(last=True)

    def _report(self, *, last: bool) -> None:
        if self._waiting is None:
            return
        import ray.train

        (epoch, metrics), self._waiting = self._waiting, None
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self._every and (last or epoch % self._every == 0) and self._rank == 0:
                write_model(self.model, pathlib.Path(folder, MODEL))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, **metrics}, checkpoint=checkpoint)
