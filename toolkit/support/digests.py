"""The SHA-256 of a file of any size."""

import hashlib
import pathlib

__all__ = ["sha256"]


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file as 64 hexadecimal digits.

    Raises:
        OSError: The file can't be read.
    """
    digest = hashlib.sha256()  # hashlib.file_digest is new in Python 3.11.
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
