"""An evaluator: a task that evaluates each checkpoint while others train, so that training doesn't wait."""

import csv
import json
import logging
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.errors import RunDirectoryError
from toolkit.support import status
from toolkit.training import state
from toolkit.training.checkpoints import CheckpointStore
from toolkit.training.directory import choose

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger(__name__)
_ROUNDED = 1.0  # Seconds by which the time may be wrong at which Linux says that a process began.
_LOOK = 1.0  # Seconds between two looks at the directory.


def follow(directory: str | os.PathLike | None, model: "keras.Model", data: Any, *, recipe: str) -> None:
    """Evaluates each new checkpoint of a run until the run has ended; writes RUN_DIR/evaluation.csv, a row for each.

    Where checkpoints come faster than they are evaluated, the newest is taken. Only that file is
    written in the run directory.

    Args:
        directory: The run directory; None for the one of this launched job.
        model: Compiled as the one that is trained.
        data: What `model.evaluate` takes.
        recipe: Name of the program whose run it is.

    Raises:
        RunDirectoryError: Nothing says which directory it is.
        CheckpointError: The checkpoints are another model's.
    """
    from toolkit.training.progress import in_words, scalars, write_rows

    if directory is None and status.job_id() is None:
        raise RunDirectoryError(
            asked="an evaluator evaluates the checkpoints of a run",
            found="nothing says where they are",
            remedy="Name the chief's --run_dir, on a disk that both see",
        )
    path, _ = choose(directory, recipe=recipe, resume=False)
    store = CheckpointStore(path / "checkpoints")
    table = path / "evaluation.csv"
    rows: list[dict[str, Any]] = []
    if table.exists():
        with table.open(newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    began = _began()
    status.report(state="following", follows=True)
    _LOG.info("Following the checkpoints in %s", path)
    step = max((int(row["step"]) for row in rows), default=-1)
    while True:
        ended = _ended(path / "summary.json", since=began)
        checkpoint = store.newest(after=step)
        if checkpoint is not None:
            status.report(state="evaluating")
            state.restore(model, checkpoint.arrays)
            values = model.evaluate(data, verbose=0, return_dict=True)
            step = checkpoint.step
            rows.append({"step": step, **scalars(values)})
            write_rows(table, rows, empty="step")
            _LOG.info("step %d: %s", step, in_words(values))
            status.report(state="following")
        elif ended:
            _LOG.info("The run has ended, and its last checkpoint is evaluated: %s", table)
            return
        else:
            time.sleep(_LOOK)


def _began() -> float:
    """Returns when this task began, in seconds since 1970: with its job, and so before the run could end.

    Its script may have taken longer to get here than the run took.
    """
    return psutil.Process().create_time() - _ROUNDED


def _ended(summary: pathlib.Path, *, since: float) -> bool:
    """Whether the run has written its summary since this task began.

    An older summary belongs to the run that is being resumed.
    """
    try:
        return summary.stat().st_mtime >= since and bool(json.loads(summary.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
