"""How often what has failed is started again."""

__all__ = ["Budget"]


class Budget:
    """How often something may still be started again.

    Args:
        most: In all.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self) -> bool:
        """Says whether it may once more, and counts it."""
        self.left -= 1
        return self.left >= 0

    @property
    def words(self) -> str:
        """What is used up, such as "restart 1 of 3"."""
        return f"restart {self.most - max(0, self.left)} of {self.most}"
