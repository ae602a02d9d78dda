"""The toolkit's messages on the console, beside the progress bar and never through it."""

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
        with contextlib.suppress(OSError):  # A message that can't be shown, on a full disk, ends no training.
            # A log file's lines are whole; a terminal's break between words.
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show() -> None:
    """Shows the messages of `toolkit`'s loggers, from INFO on, as plain lines on standard output."""
    logger = logging.getLogger("toolkit")
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl's root handler would print each line again.


def say(text: str) -> None:
    """Shows a line of a recipe's own, as the toolkit's messages are shown."""
    logging.getLogger("toolkit.recipes").info("%s", text)


def show_variables(report: Mapping[str, Any]) -> None:
    """Prints which task holds which variable of a model, and what each holds in all.

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
