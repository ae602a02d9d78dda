"""Writing a file so that it is there whole or not at all: aside, synced, renamed."""

import json
import os
import pathlib
from typing import Any

__all__ = ["sync", "write_json", "write_text"]


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces `path` by a file that holds `text`; whoever reads it sees the old or the new one.

    Raises:
        OSError: It can't be written; the old file is untouched.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    """As `write_text`, for a value that JSON can hold."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync(path: pathlib.Path) -> None:
    """Makes what was written to a file, or renamed in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
