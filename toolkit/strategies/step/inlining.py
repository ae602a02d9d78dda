"""Inlines a `tf.function` that a step calls.

TensorFlow traces it as a separate function, and calls that again in whatever is traced later. But TensorFlow lets
replicas exchange nothing in a function within a step; and beside parameter servers variables are tensors of the step,
which a function that was traced in another step would go on using. Here its Python is called where it stands, converted
by AutoGraph as usual. A function that XLA is asked to compile stays a function.

TensorFlow has no public hook for it; `tests/strategies/test_inlining.py` fails when it changes.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function

from toolkit.strategies.context import here, known
from toolkit.support.wrapping import wrap

__all__ = ["adapt_functions", "inlining"]


def adapt_functions() -> None:
    """Makes functions that a step calls part of it. Later calls do nothing."""
    wrap(polymorphic_function.Function, "__call__", _call)


def inlining() -> contextlib.AbstractContextManager[None]:
    """A context in which a step is traced or run, with the functions that it calls inlined."""
    return known(inlines=True)


def _call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    if not here.inlines or function._jit_compile:
        return original(function, *args, **kwargs)
    python, status = function.python_function, ag_ctx.Status.DISABLED
    if function._autograph:
        python, status = autograph_util.py_func_from_autograph(python), ag_ctx.Status.ENABLED
    with ag_ctx.ControlStatusCtx(status):  # As TensorFlow does while it traces the function.
        return python(*args, **kwargs)
