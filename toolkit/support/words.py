"""Numbers of things, in words."""

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Returns such as "1 task" or "2,000 tasks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
