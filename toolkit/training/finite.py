"""Whether weights are still numbers: what has diverged must not take a good checkpoint's place."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from toolkit.errors import Diverged

if TYPE_CHECKING:
    import keras

__all__ = ["check"]


def check(
    model: "keras.Model",
    arrays: "Mapping[str, np.ndarray]",
    *,
    step: int,
    good: int | None,
    directory: object,
) -> None:
    """Makes sure that a model's weights are finite. It is a collective.

    The weights of all processes are the same, but what each has seen of its own data in between, such as
    BatchNormalization's statistics, isn't: so they agree.

    Args:
        model: Whose strategy's processes take part.
        arrays: What `state.capture` returned for it.
        step: Where training stands.
        good: The step of the last checkpoint that was written; None if there is none.
        directory: Where checkpoints are.

    Raises:
        Diverged: On every process, where a weight of any is NaN or infinite.
    """
    from toolkit.strategies import agreement

    weights = {name: array for name, array in arrays.items() if name.startswith("model/")}
    bad = [name for name, array in weights.items() if not _finite(array)]
    most = int(agreement.extremes(model.distribute_strategy, np.array([len(bad)], np.int64))[1][0])
    if not most:
        return
    first = f" (the first is {model.variables[int(bad[0].split('/')[1])].path})" if bad else ""
    kept = "there is none yet" if good is None else f"the last good one is that of step {good} in {directory}"
    raise Diverged(
        f"Training has diverged: after step {step}, {most} of {len(weights)} weights hold NaN or infinity{first}. "
        f"No checkpoint is written of that; {kept}. "
        "Train with a lower learning rate, or look for examples that are not finite."
    )


def _finite(array: np.ndarray) -> bool:
    if array.dtype.kind in "biuS":
        return True
    # bfloat16 and float8 are kinds of their own.
    return bool(np.isfinite(array if array.dtype.kind in "fc" else array.astype(np.float32)).all())
