"""The learning rate: scaled with the global batch, warmed up, then a cosine decay to zero.

Linear scaling and warm-up: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv 1706.02677),
sections 2.1 and 2.2. Square-root scaling, which keeps the gradient's variance: Krizhevsky, arXiv
1404.5997, section 5.
"""

from typing import TYPE_CHECKING

from toolkit.errors import RequestError

if TYPE_CHECKING:
    import keras

SCALINGS = ("linear", "sqrt", "none")
_WARM_UP = 0.2  # A share of all steps: of five epochs, one.


def learning_rate(
    rate: float, *, global_batch_size: int, total_steps: int, reference_batch_size: int = 128, scaling: str = "linear"
) -> "keras.optimizers.schedules.CosineDecay":
    """Returns a schedule that peaks at `rate`, scaled by the ratio of the batch to the reference batch.

    Args:
        rate: Peak learning rate at the reference batch size.
        global_batch_size: Examples per step, over all replicas.
        total_steps: Steps of the whole training.
        reference_batch_size: The global batch size that `rate` was chosen for.
        scaling: "linear" or "sqrt" in global_batch_size / reference_batch_size, or "none".

    Raises:
        RequestError: The rate is not positive, there are no steps, or the scaling is unknown.
    """
    if not 0 < rate < float("inf"):
        raise RequestError(
            asked=f"learning_rate={rate}", found="a rate must be above 0 and finite", remedy="Give one such as 0.1"
        )
    if total_steps < 1:
        raise RequestError(
            asked=f"{total_steps} training steps",
            found="there must be at least one",
            remedy="Train for an epoch or more",
        )
    RequestError.check_choice(scaling, SCALINGS, asked=f"scaling={scaling!r}", found="there is no such scaling")
    import keras

    growth = global_batch_size / reference_batch_size
    peak = rate * {"linear": growth, "sqrt": growth**0.5, "none": 1.0}[scaling]
    warm_up = min(max(1, round(total_steps * _WARM_UP)), total_steps)
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=peak / warm_up,
        warmup_target=peak,
        warmup_steps=warm_up,
        decay_steps=max(1, total_steps - warm_up),
    )
