"""Writes a report about run directories to a file."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import RequestError
from toolkit.observe.report.page import render
from toolkit.observe.report.reading import RunData, read, told_apart
from toolkit.support.files import write_text

if TYPE_CHECKING:
    from toolkit.training import Run

__all__ = ["write", "write_after"]

NAME = "report.html"
_LOG = logging.getLogger(__name__)


def write(directories: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page about one run, or about several compared, and returns its path.

    Args:
        directories: Run directories.
        out: The file; None for report.html in the run's directory, or here where there are several.

    Raises:
        RunDirectoryError: One of them is no run directory.
        RequestError: The page can't be written there.
    """
    runs = told_apart([read(path) for path in directories])
    file = pathlib.Path(out) if out is not None else (runs[0].path / NAME if len(runs) == 1 else pathlib.Path(NAME))
    with _errors_explained(file):
        _check(file, runs)
    text = render(runs)
    with _errors_explained(file):
        if file.exists() and not file.is_file():  # A device or a pipe is written to, not replaced.
            file.write_text(text, encoding="utf-8")
        else:
            write_text(file.resolve(), text)
    return file


@contextlib.contextmanager
def _errors_explained(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    # A NUL character raises a ValueError, a link to itself a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise RequestError(
            asked=f"the report is to be written to {file}",
            found=f"that can't be done ({reason})",
            remedy="Use --out to name a file in an existing directory",
        ) from error


def _check(file: pathlib.Path, runs: Sequence[RunData]) -> None:
    """Refuses a path that would overwrite a run's own files, before any work."""
    found = ""
    if not file.name or file.is_dir():
        found = "that is no name of a file"
    elif file.suffix.lower() not in (".html", ".htm") and file.resolve().parent in {run.path.resolve() for run in runs}:
        found = "there it could take the place of the run's own files"
    if found:
        raise RequestError(asked=f"--out={file}", found=found, remedy="Name a file that ends in .html")


def write_after(run: "Run") -> None:
    """Writes the page about a run that has ended, if this process has its directory; a failure is only logged."""
    if run.path is None:
        return
    try:
        _LOG.info("Report: %s", write([run.path]))
    except Exception as error:  # A report must never make a run fail.
        _LOG.warning("The report can't be written (%s: %s)", type(error).__name__, error)
