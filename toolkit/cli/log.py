"""The toolkit's messages on the console, beside the progress bar and never through it."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.devices import Setup

__all__ = ["show", "show_devices"]


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        import rich

        text = self.format(record)
        style = (
            "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        )
        console = rich.get_console()
        # A log file's lines are whole; a terminal's break between words.
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show() -> None:
    """Shows the messages of `toolkit`'s loggers, from INFO on, as plain lines on standard output."""
    logger = logging.getLogger("toolkit")
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl's root handler would print each line again.


def show_devices(setup: "Setup") -> None:
    """Prints what `toolkit.devices.configure` did, and loudly where CPU devices stand in for GPUs."""
    import rich

    console = rich.get_console()
    console.print(setup)
    if setup.emulated:
        console.print(
            f"No GPU in use: {setup.replicas} logical CPU devices stand in. They share {setup.cores} cores, "
            "so the numbers are right and the speed says nothing about GPUs.",
            style="bold yellow",
            soft_wrap=not console.is_terminal,
        )
