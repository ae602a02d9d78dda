"""Finds the line of a script's own from which a call has come."""

import os
from typing import Any

# Also what lies between: the beginnings of threads and contexts.
_NOT_OWN = ("toolkit.", "keras.", "tensorflow.", "threading", "concurrent.", "contextlib", "functools")


def users_frame(frame: Any) -> Any:
    """Returns the innermost frame outside of this library, Keras and TensorFlow; None if there is none.

    Args:
        frame: Where to begin.
    """
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_OWN):
        frame = frame.f_back
    return frame


def line_of(frame: Any) -> str:
    """Returns a frame's file and line, such as "train.py, line 12"; "an unknown place" for None."""
    if frame is None:
        return "an unknown place"
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
