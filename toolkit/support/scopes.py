"""Work done outside of the scopes of its caller: TensorFlow's and Keras's are those of a thread."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

__all__ = ["outside"]

_Result = TypeVar("_Result")


def outside(function: Callable[[], _Result]) -> _Result:
    """Calls a function in its own thread, waits for it, and returns what it does, or raises what it raises.

    It sees no graph, strategy, replica, stateless scope or device that its caller has entered.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
