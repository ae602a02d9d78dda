"""How long a training is."""

import dataclasses

from toolkit.errors import RequestError

__all__ = ["Length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """`epochs` of `steps_per_epoch` steps each.

    Raises:
        RequestError: One of them is below 1.
    """

    epochs: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise RequestError(
                    asked=f"{field.name}={value} says how long to train",
                    found="the least is 1",
                    remedy="Give 1 or more",
                )

    @property
    def total_steps(self) -> int:
        """Steps in all."""
        return self.epochs * self.steps_per_epoch
