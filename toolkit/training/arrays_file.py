"""A file of arrays, written and read one array at a time, in the format of safetensors.

The library takes and returns all arrays of a file at once, and copies each: a checkpoint would need twice the memory of
what it holds. The format is 8 bytes with the length of a header in JSON, the header, and the arrays' bytes:

    {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...}
"""

import hashlib
import json
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from toolkit.training.arrays import Arrays, Later, dtype_named, raw

_NAMES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
}
_LONGEST = 100_000_000  # Bytes of a header, as in safetensors.
_BLOCK = 1 << 24


def write(path: pathlib.Path, arrays: Arrays) -> str:
    """Writes a file, and returns its SHA-256 in hexadecimal.

    Raises:
        OSError: It can't be written, or the format has no such dtype.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, each in arrays.later.items():
        begin, end = end, end + each.nbytes
        header[name] = {"dtype": _name(each.dtype), "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:

        def put(content: Any) -> None:
            digest.update(content)
            file.write(content)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for each in arrays.later.values():
            put(raw(each.read()))
    return digest.hexdigest()


def read(path: pathlib.Path, *, dtypes: Mapping[str, str], check: Callable[[str], object]) -> Arrays:
    """Returns the arrays of a file, which stays open until the last of them is forgotten.

    Args:
        path: A file that `write` or safetensors has written.
        dtypes: Name -> the name of its dtype: the format hasn't all of them.
        check: Is called with the file's SHA-256, before anything of it is believed.

    Raises:
        OSError: It can't be read.
        ValueError, KeyError, TypeError: It isn't such a file.
    """
    opened = _Opened(path)
    check(opened.sha256())
    length = int.from_bytes(opened.read(0, 8), "little")
    if length > min(_LONGEST, opened.size - 8):
        raise ValueError(f"a header of {length} bytes, in a file of {opened.size}")
    header = json.loads(opened.read(8, length))
    found = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        (begin, end), shape, dtype = facts["data_offsets"], tuple(facts["shape"]), dtype_named(dtypes[name])
        if not 0 <= begin <= end <= opened.size - 8 - length or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is at bytes {begin} to {end}, with shape {shape} and dtype {dtype}")
        found[name] = Later(shape=shape, dtype=dtype, read=opened.reader(8 + length + begin, shape, dtype))
    return Arrays(found)


def _name(dtype: np.dtype) -> str:
    # bfloat16 and float8 are stored as integers of the same size.
    name = dtype.name if dtype.kind in "biufc" else f"uint{8 * dtype.itemsize}"
    if name not in _NAMES:
        raise OSError(f"a file of arrays can't hold dtype {dtype}")
    return _NAMES[name]


class _Opened:
    """A file that is read at some places, also when it has been renamed or removed meanwhile."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file: BinaryIO = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self.size = os.fstat(self._file.fileno()).st_size

    def sha256(self) -> str:
        digest = hashlib.sha256()
        while block := self._file.read(_BLOCK):
            digest.update(block)
        return digest.hexdigest()

    def read(self, begin: int, length: int) -> bytes:
        return self._into(begin, np.empty(length, np.uint8)).tobytes()

    def reader(self, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], np.ndarray]:
        def array() -> np.ndarray:
            whole = np.empty(shape, dtype)
            self._into(begin, whole.reshape(-1).view(np.uint8))
            return whole

        return array

    def _into(self, begin: int, content: np.ndarray) -> np.ndarray:
        done = 0
        while done < len(content):  # One call reads 2 GiB at most.
            self._file.seek(begin + done)
            count = self._file.readinto(content[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"the file ends at byte {begin + done}")
            done += count
        return content
