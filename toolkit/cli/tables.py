"""Tables and charts of one style."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import RequestError

__all__ = ["check_chart", "save", "show_seconds", "table"]


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
