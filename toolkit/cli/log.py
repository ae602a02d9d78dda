"""Prints the toolkit's messages on the console without breaking Keras's progress bar."""

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.support import redaction

if TYPE_CHECKING:
    from toolkit.devices import Setup

__all__ = ["say", "show", "show_devices", "show_variables"]


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        import rich

        text = redaction.masked(self.format(record), os.environ)
        style = (
            "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        )
        console = rich.get_console()
        # A message that can't be written, such as on a full disk, must not end the training.
        with contextlib.suppress(OSError):
            # A log file gets whole lines; a terminal's lines are wrapped between words.
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show() -> None:
    """Prints the messages of `toolkit`'s loggers from INFO on as plain lines on standard output."""
    logger = logging.getLogger("toolkit")
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl's root handler would print each line again.


def say(text: str) -> None:
    """Prints a recipe's line in the style of the toolkit's messages."""
    logging.getLogger("toolkit.recipes").info("%s", text)


def show_variables(report: Mapping[str, Any]) -> None:
    """Prints which task holds which variable of a model, and the total of each task.

    Args:
        report: What `toolkit.strategies.report` returned; of a strategy that has none, nothing is printed.
    """
    if not report:
        return
    import rich
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variable", overflow="fold")
    table.add_column("shape")
    for heading in ("KiB", "task"):
        table.add_column(heading, justify="right")
    for row in report["variables"]:
        if row["task"] != "chief:0":
            shape = " x ".join(map(str, row["shape"]))
            table.add_row(row["name"], shape, f"{row['bytes'] / 1024:,.1f}", row["task"])
    table.add_section()
    for task, size in report["bytes_by_task"].items():
        table.add_row("in all", "", f"{size / 1024:,.1f}", task)
    rich.get_console().print(table)


def show_devices(setup: "Setup") -> None:
    """Prints what `toolkit.devices.configure` did, with a clear warning if CPU devices stand in for GPUs."""
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
