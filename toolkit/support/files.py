"""Writes files whole or not at all, into a temporary file that is synced and renamed, and not for all to write."""

import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import pathlib
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_EVERYBODY = 0o002  # Write permission for others than the owner and the group.
_lock = threading.Lock()
_entered: list[int] = []  # For each block that a thread is in, the umask from before the first block.


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps what the process creates in the block from being writable for everybody. Never loosens the umask.

    A process has one umask: it holds for files that libraries make, and for all threads. The last thread that leaves
    such a block puts back what the first has found.
    """
    with _lock:
        # The umask can't be read without being set; it is strict meanwhile.
        before = _entered[0] if _entered else os.umask(0o077)
        _entered.append(before)
        os.umask(before | _EVERYBODY)
    try:
        yield
    finally:
        with _lock:
            _entered.pop()
            if not _entered:
                os.umask(before)


def state_directory() -> pathlib.Path:
    """Returns the directory for this user's persistent state: ~/.local/state/toolkit, or below $XDG_STATE_HOME."""
    base = os.environ.get("XDG_STATE_HOME") or pathlib.Path("~/.local/state").expanduser()
    return pathlib.Path(base, "toolkit")


def read_text(path: pathlib.Path, *, errors: str = "strict") -> str:
    """Returns the text of a file.

    Raises:
        OSError: It can't be read, or `check_file` refuses it.
        ValueError: It is no UTF-8.
    """
    check_file(path)
    return path.read_text(encoding="utf-8", errors=errors)


def check_file(path: pathlib.Path) -> None:
    """Checks that a path can be read to its end, unlike a pipe or a device.

    Raises:
        OSError: It is no file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, name: str | None = None) -> Iterator[pathlib.Path]:
    """Yields a temporary path, which replaces `path` at the end of the block: readers see the old or the new file.

    Where the block raises, the old file is untouched and what was written is removed. Renaming replaces whatever is
    at `path`, for root even /dev/null: look what it is.

    Args:
        path: The file.
        name: The name of the new file meanwhile, beside the old one; ".NAME.writing" unless given.
    """
    aside = path.with_name(name or f".{path.name}.writing")
    aside.unlink(missing_ok=True)  # Whatever its type: opening a pipe would wait for a reader.
    try:
        yield aside
        aside.replace(path)
    except OSError as error:  # Errors must name `path`, the only name that the caller knows.
        for part in ("filename", "strerror"):
            if (text := getattr(error, part)) is not None:
                setattr(error, part, str(text).replace(str(aside), str(path)))
        raise
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces `path` by a file with this text; the file survives a power cut.

    Raises:
        OSError: It can't be written; the old file is untouched.
    """
    with guarded(), replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="")
        sync(aside)
    sync(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces `path` as `write_text` does, by a JSON value; NaN and infinity, which JSON doesn't have, become null."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # A path need not be text: Python's strings hold half a surrogate pair for such a byte, which JSON writes as \udcff.
    write_text(path, text.encode(errors="backslashreplace").decode())


def plain(value: Any) -> Any:
    """Returns a value with None in place of each NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]], *, empty: Sequence[str]) -> None:
    """Replaces `path` as `write_text` does, by a CSV table of rows that may have different columns.

    Args:
        path: The file.
        rows: Each row: column -> value.
        empty: The columns of a table without rows.
    """
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row)) or list(empty)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory and its parents, which survive a power cut and aren't writable for everybody.

    Raises:
        OSError: It can't be made, or something else is there.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with guarded():
        path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def sync(path: pathlib.Path) -> None:
    """Makes what was written to a file, or renamed in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file of any size as 64 hexadecimal digits.

    Raises:
        OSError: The file can't be read.
    """
    digest = hashlib.sha256()  # hashlib.file_digest is new in Python 3.11.
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
