"""Runs a function once, and observes where its operations run."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.observe.placement.internals import kernels, recording
from toolkit.observe.placement.names import short
from toolkit.observe.placement.report import Copy, Operation, Report, Variable

__all__ = ["observe"]

_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_EDGES = ("_Arg", "_Retval")  # The function's own arguments and results.


def observe(function: Callable | keras.Model, *args: Any, **kwargs: Any) -> Report:
    """Traces a function again, runs it once, and returns where TensorFlow placed each operation.

    Args:
        function: A Python function, a tf.function (traced again, without its jit_compile or input_signature), or a
            Keras model, which is called with training=False, and with a list of its inputs where there are several.
        args: What the function is called with. NumPy's arrays become tensors, also within lists and dictionaries.
        kwargs: What the function is called with by name; NumPy's arrays as above.

    Returns:
        Operations by their names in the function; those that TensorFlow added for a loop, or in the place of others,
        are marked so. Bytes are known where shapes are known before running.
    """
    traced = _function(function)
    given, named = tf.nest.map_structure(_tensor, (args, kwargs))
    with recording() as recorded:
        concrete = traced.get_concrete_function(*given, **named)
        traced(*given, **named)
    graphs = recorded[0].function_graphs
    before = [node for graph in graphs for node in graph.pre_optimization_graph.node if node.op not in _EDGES]
    after = [node for graph in graphs for part in graph.partition_graphs for node in part.node]
    sizes = dict(_sizes(concrete.graph))
    return Report(
        operations=tuple(_operations(before, after)),
        copies=tuple(_copies(after, sizes)),
        variables=tuple(_variables(function, concrete)),
    )


def _function(function: Any) -> Any:
    if isinstance(function, keras.Model):
        return tf.function(
            lambda *inputs: function(inputs[0] if len(inputs) == 1 else list(inputs), training=False), autograph=False
        )
    # A function that has already run isn't placed again.
    return tf.function(getattr(function, "python_function", function))


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _operations(before: Iterable[Any], after: Iterable[Any]) -> Iterator[Operation]:
    ran = {node.name: node for node in after if node.op not in (*_SENDS, *_RECEIVES, *_EDGES)}
    there = {device.name for device in tf.config.list_logical_devices()}
    for node in before:
        where = ran.pop(node.name).device if node.name in ran else None
        because = _because(node, where, there) if where and node.device else ""
        asked = short(node.device) if node.device else ""
        yield Operation(name=node.name, kind=node.op, asked=asked, ran=where, because=because)
    for node in ran.values():
        yield Operation(name=node.name, kind=node.op, ran=node.device, added=True)


def _because(node: Any, ran: str, there: set[str]) -> str:
    """Why an operation ran on another device than asked; "" if it didn't."""
    asked, found = (tf.DeviceSpec.from_string(name) for name in (node.device, ran))
    parts = ("job", "replica", "task", "device_type", "device_index")
    if all(getattr(asked, part) in (None, getattr(found, part)) for part in parts):
        return ""
    if not any(_is(asked, name, parts) for name in there):
        return f"there is no {short(node.device)} in this process"
    if asked.device_type not in kernels(node.op):
        return f"{node.op} has no kernel for a {asked.device_type}"
    return "no kernel there supports its dtypes, or its input is on the other device"


def _is(asked: tf.DeviceSpec, name: str, parts: Iterable[str]) -> bool:
    full = tf.DeviceSpec.from_string(name)
    # Outside of a cluster, TensorFlow's device names have neither job nor task.
    return all(getattr(asked, part) in (None, getattr(full, part)) or getattr(full, part) is None for part in parts)


def _copies(nodes: Iterable[Any], sizes: dict[str, int | None]) -> Iterator[Copy]:
    for node in nodes:
        if node.op in _SENDS:
            source, target = (node.attr[name].s.decode() for name in ("send_device", "recv_device"))
            # A control dependency, which carries no tensor.
            waits = node.input[0].startswith(("^", "GroupCrossDeviceControlEdges")) or "/ctrl/_" in node.input[0]
            if source != target and not waits:
                tensor = node.input[0] if ":" in node.input[0] else f"{node.input[0]}:0"
                yield Copy(tensor=tensor, source=source, target=target, bytes=sizes.get(tensor))


def _sizes(graph: Any) -> Iterator[tuple[str, int | None]]:
    for operation in graph.get_operations():
        for tensor in operation.outputs:
            if tensor.shape.is_fully_defined() and tensor.dtype.is_numpy_compatible and tensor.dtype != tf.resource:
                yield tensor.name, math.prod(tensor.shape) * tensor.dtype.size


def _variables(function: Any, concrete: Any) -> Iterator[Variable]:
    if isinstance(function, keras.Model):
        pairs = [(variable.path, variable.value) for variable in function.variables]
    else:
        pairs = [(variable.name, variable) for variable in concrete.variables]
    for name, variable in pairs:
        yield Variable(name=name, device=variable.device, bytes=math.prod(variable.shape) * variable.dtype.size)
