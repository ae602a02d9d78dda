"""Runs work outside of the caller's scopes. TensorFlow and Keras keep scopes by thread."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

__all__ = ["outside"]

_Result = TypeVar("_Result")


def outside(function: Callable[[], _Result]) -> _Result:
    """Calls a function in a new thread, waits for it, and returns its result or raises its exception.

    It sees no graph, strategy, replica, stateless scope or device that its caller has entered.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
