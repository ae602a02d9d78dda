"""Ways to divide layers, side by side: predicted and measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.parallel import Row

__all__ = ["show_rows"]


def show_rows(rows: "Sequence[Row]") -> None:
    """Prints them as one table.

    Args:
        rows: As `recipes.cifar_parallelism` makes them.
    """
    import rich
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("conv", no_wrap=True)
    table.add_column("FC", no_wrap=True)
    headings = ("ms/step\npredict.", "\nmeasured", "MB recv.\npredict.", "\nmeasured", "weights\nmillion", "\nloss")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.conv,
            row.fc,
            f"{row.predicted_seconds * 1e3:,.1f}",
            "-" if row.measured_seconds is None else f"{row.measured_seconds * 1e3:,.1f}",
            f"{row.predicted_bytes / 1e6:,.2f}",
            "-" if row.measured_bytes is None else f"{row.measured_bytes / 1e6:,.2f}",
            f"{row.parameters / 1e6:,.2f}",
            f"{row.loss:.4f}",
        )
    console = rich.get_console()
    console.print()
    console.print(table)
