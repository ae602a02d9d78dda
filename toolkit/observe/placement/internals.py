"""Private hooks of TensorFlow; `test_recording.py` fails if an upstream release changes them."""

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["kernels", "recording"]


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Records what TensorFlow runs; at the end of the block, the list holds one RunMetadata.

    TensorFlow 2 has no public call for what Session.run(run_metadata=...) gave. The profiler names
    kernels and times, not the devices of single operations with their outputs.
    """
    from tensorflow.python.eager import context

    metadata: list[Any] = []
    context.enable_run_metadata()
    try:
        # TensorFlow keeps the graphs of everything placed since the last export; this export drops the earlier ones.
        context.export_run_metadata()
        yield metadata
        metadata.append(context.export_run_metadata())
    finally:
        context.disable_run_metadata()


def kernels(kind: str) -> frozenset[str]:
    """Returns the types of devices, such as "CPU", for which this TensorFlow has a kernel of an operation."""
    from tensorflow.python.framework import kernels as registered

    return frozenset(kernel.device_type for kernel in registered.get_registered_kernels_for_op(kind).kernel)
