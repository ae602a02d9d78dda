"""What a program shows: messages that leave Keras's progress bar whole, tables, and charts of one style."""

import contextlib
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import RequestError
from toolkit.support import redaction

if TYPE_CHECKING:
    from toolkit.devices import Setup


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = redaction.masked(self.format(record), os.environ)
        style = (
            "bold red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        )
        # A message that can't be written, such as on a full disk, must not end the training.
        with contextlib.suppress(OSError):
            echo(text, style=style)


def echo(text: str, *, style: str | None = None) -> None:
    """Prints text as it is: whole lines to a file; a terminal's lines are wrapped between words."""
    import rich

    console = rich.get_console()
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def show_log() -> None:
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


def table(*headings: str) -> Any:
    """Returns a rich table; columns whose heading ends in > are aligned to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        made.add_column(
            heading.removesuffix(">"), justify="right" if heading.endswith(">") else "left", overflow="fold"
        )
    return made


def check_chart(path: str | None) -> None:
    """Checks, before any work, that a chart can be written to a file of this name.

    Raises:
        RequestError: It is neither .png nor .svg, or in no directory that is there.
    """
    if path is not None and pathlib.Path(path).suffix.lower() not in (".png", ".svg"):
        raise RequestError(
            asked=f"--chart={path}", found="charts are PNG or SVG", remedy="End its name in .png or .svg"
        )
    if path is not None and not pathlib.Path(path).absolute().parent.is_dir():
        raise RequestError(
            asked=f"--chart={path}", found="there is no such directory", remedy="Name a file in a directory that exists"
        )


def save(figure: Any, path: str) -> None:
    """Writes a matplotlib figure.

    Raises:
        RequestError: It can't be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RequestError(
            asked=f"--chart={path}", found=f"it can't be written: {error.strerror}", remedy="Name another place"
        ) from None


def show_seconds(
    title: str,
    seconds: Mapping[str, Sequence[float]],
    notes: Mapping[str, Mapping[str, str]],
    *,
    chart: str | None = None,
) -> None:
    """Prints the median, least and most of several measurements, and draws them.

    Args:
        title: What was done.
        seconds: What each round of each way took.
        notes: Further columns: heading -> way -> text.
        chart: A .png or .svg file.

    Raises:
        RequestError: The chart can't be written.
    """
    import statistics

    import rich

    made = table("", "seconds>", "least>", "most>", *(f"{heading}>" for heading in notes))
    for name, took in seconds.items():
        figures = (statistics.median(took), min(took), max(took))
        made.add_row(name, *(f"{each:.3f}" for each in figures), *(column.get(name, "") for column in notes.values()))
    console = rich.get_console()
    console.print(title, highlight=False)
    console.print(made)
    if chart is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.6 * len(seconds)), layout="constrained")
    axes = figure.subplots()
    middles = [statistics.median(took) for took in seconds.values()]
    spread = [
        [middle - min(took) for middle, took in zip(middles, seconds.values(), strict=True)],
        [max(took) - middle for middle, took in zip(middles, seconds.values(), strict=True)],
    ]
    axes.barh(list(seconds), middles, xerr=spread, color="#0072b2", height=0.6, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("seconds, median; the line goes from least to most")
    axes.set_title(title)
    save(figure, chart)
