"""Where operations and variables run: `place` chooses it for layers of a model, `observe` shows it.

`recording` and `kernels` use private parts of TensorFlow; `test_recording.py` fails if a release changes them.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import DeviceError, ModelError, StrategyError
from toolkit.parallel.graph import copy_model, is_graph, layers_of
from toolkit.parallel.layers.kinds import plain_layer
from toolkit.strategies.upstream import private
from toolkit.support.words import did_you_mean, nearest

__all__ = ["Copy", "Operation", "Report", "Variable", "device", "kernels", "observe", "place"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a traced function.

    Attributes:
        name: Its name in the function, such as "fc1/MatMul".
        kind: The kind of operation, such as "MatMul".
        asked: The device that tf.device named, in full or in part; "" where none was.
        ran: The full name of the device that it runs on; None where TensorFlow folded it into others beforehand.
        because: Why `ran` is another device than asked; "" where it isn't.
        added: Whether TensorFlow put it there, for a loop or a faster form; copies aren't listed.
    """

    name: str
    kind: str
    asked: str = ""
    ran: str | None = None
    because: str = ""
    added: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that is copied from one device to another, once for each copy.

    Attributes:
        tensor: Its name in the function, such as "fc1/MatMul:0".
        source: Full name of the device it is made on.
        target: Full name of the device it is needed on.
        bytes: The tensor's size; None where its shape isn't known before it runs.
    """

    tensor: str
    source: str
    target: str
    bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable that the function reads or writes.

    Attributes:
        name: The name that TensorFlow or Keras gives it.
        device: Full name of the device that holds it.
        bytes: The size of its value.
    """

    name: str
    device: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `observe`; `print` it."""

    operations: tuple[Operation, ...]
    copies: tuple[Copy, ...]
    variables: tuple[Variable, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of operations on each device, by the device's full name."""
        return dict(collections.Counter(each.ran for each in self.operations if each.ran is not None))

    @property
    def moved(self) -> tuple[Operation, ...]:
        """Returns the operations that soft placement moved to another device than asked."""
        return tuple(each for each in self.operations if each.because)

    def __str__(self) -> str:
        lines = []
        for where in sorted({*self.counts, *(each.device for each in self.variables)}):
            kinds = collections.Counter(each.kind for each in self.operations if each.ran == where)
            most = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(4))
            held = [each.bytes for each in self.variables if each.device == where]
            holds = f"; {len(held)} variables, {sum(held) / 2**10:,.1f} KiB" if held else ""
            lines.append(f"{short(where)}: {self.counts.get(where, 0)} operations ({most}){holds}")
        lines += [
            f"moved: {each.name} ({each.kind}), asked for {each.asked}, ran on {short(each.ran or '')}: {each.because}"
            for each in self.moved
        ]
        for copy in self.copies:
            size = "size unknown" if copy.bytes is None else f"{copy.bytes:,} bytes"
            lines.append(f"copied: {copy.tensor} from {short(copy.source)} to {short(copy.target)}, {size}")
        folded = sum(each.ran is None for each in self.operations)
        if folded:
            lines.append(f"{folded} operations were folded into others before running")
        return "\n".join(lines)


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
    given, named = tf.nest.map_structure(
        lambda value: tf.convert_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value,
        (args, kwargs),
    )
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


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Records what TensorFlow runs; at the end of the block, the list holds one RunMetadata.

    TensorFlow 2 has no public call for what Session.run(run_metadata=...) gave. The profiler names
    kernels and times, not the devices of single operations with their outputs.
    """
    context = private.context
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
    return frozenset(kernel.device_type for kernel in private.get_registered_kernels_for_op(kind).kernel)


Rule = Mapping[str, str] | Callable[[keras.layers.Layer], str | None]


def place(model: keras.Model, rule: Rule) -> keras.Model:
    """Returns a model whose layers' variables and operations are on the devices that a rule names.

    Weights are those of `model`, which stays as it is. What goes from a layer to one on another device is copied there
    by TensorFlow. The layers run one after another, as their inputs allow: the devices share the memory that the model
    needs, and save no time.

    Args:
        model: Built; functional or Sequential. A model in it is placed as one layer.
        rule: A layer's name to a device, such as {"fc1": "GPU:1"}, or a function from a layer to a device; None, or no
            entry, leaves a layer to TensorFlow.

    Raises:
        DeviceError: The rule names a device that isn't there; the message lists those that are.
        ModelError: The rule names a layer that isn't there, or the model can't be taken apart.
        StrategyError: Called in a strategy's scope, where the strategy places variables.
    """
    if tf.distribute.has_strategy():
        raise StrategyError(
            asked="place() puts layers on devices by a rule",
            found="a strategy's scope is active, and it puts each variable on all its replicas",
            remedy="Call it outside of the scope, or use toolkit.parallel.parallelize() under a strategy",
        )
    if not model.built or not is_graph(model):
        raise ModelError(
            asked=f"place() takes {model.name!r} apart into layers",
            found="it isn't built" if not model.built else "it is neither functional nor Sequential",
            remedy="Give it an Input" if not model.built else "Build it from layers, or use tf.device in its call()",
        )
    devices = _devices(model, rule)

    def placed(layer: keras.layers.Layer) -> keras.layers.Layer:
        copy = plain_layer(layer)
        if id(layer) in devices:
            _run_on(copy, devices[id(layer)])
        return copy

    made = copy_model(model, placed)
    _compiles_as_placed(made)
    return made


def _devices(model: keras.Model, rule: Rule) -> dict[int, str]:
    """Returns each layer's device by the layer's id; layers of a model within have that model's device."""
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(rule, Mapping):
        names = [layer.name for layer in layers]
        for name in rule:
            if name not in names:
                raise ModelError(
                    asked=f"the rule places the layer {name!r}",
                    found=f"the layers of {model.name!r} are {', '.join(names[:30])}",
                    remedy=did_you_mean(nearest(str(name), names)) + "Give one of those names",
                )
        given = {layer.name: rule.get(layer.name) for layer in layers}
    elif callable(rule):
        given = {layer.name: rule(layer) for layer in layers}
    else:
        raise ModelError(
            asked=f"the rule is {rule!r}",
            found="it gives a device for no layer",
            remedy='Give a mapping such as {"fc1": "GPU:1"}, or a function from a layer to a device',
        )
    found = {}
    for layer in layers:
        where = given[layer.name]
        if where is not None:
            inner = [inner for _, inner in layers_of(layer)] if is_graph(layer) else [layer]
            found.update(dict.fromkeys(map(id, inner), device(where)))
    return found


def _run_on(layer: Any, where: str) -> None:
    """Makes a layer create its variables and run on a device."""

    def there(method: Callable) -> Callable:
        @functools.wraps(method)  # Keras inspects the names of its arguments.
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.device(where):
                return method(*args, **kwargs)

        return on_device

    layer.build, layer.call = there(layer.build), there(layer.call)


def _compiles_as_placed(model: Any) -> None:
    """Makes `compile` turn XLA off, which compiles for one device, and puts slots beside their weights."""
    compiled = model.compile

    @functools.wraps(compiled)
    def compiling(*args: Any, jit_compile: Any = "auto", **kwargs: Any) -> None:
        if jit_compile is True:
            raise ModelError(
                asked="compile(jit_compile=True)",
                found="XLA compiles for one device, and this model's layers are placed on several",
                remedy="Leave jit_compile out",
            )
        compiled(*args, jit_compile=False, **kwargs)
        # LossScaleOptimizer contains an optimizer.
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if optimizer is None:
            return
        add = optimizer.add_variable_from_reference

        @functools.wraps(add)
        def beside(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.device(reference_variable.value.device):
                return add(reference_variable, *args, **kwargs)

        optimizer.add_variable_from_reference = beside

    model.compile = compiling


_LOCAL = re.compile(r"/?(?:device:)?(?P<kind>[A-Za-z]+):(?P<number>\d+)")


def device(name: str) -> str:
    """Returns the name of an existing logical device, as in `tf.config.list_logical_devices`.

    Args:
        name: Such as "GPU:0", "/CPU:1", "/device:GPU:0", or with job and task.

    Raises:
        DeviceError: There is no such device; the message lists those that are there.
    """
    import tensorflow as tf

    there = [logical.name for logical in tf.config.list_logical_devices()]
    local = _LOCAL.fullmatch(name) if isinstance(name, str) else None
    wanted = f"/device:{local['kind'].upper()}:{int(local['number'])}" if local else name
    found = [full for full in there if full == wanted or (local and full.endswith(wanted))]
    if not found:
        raise DeviceError(
            asked=f"device {name!r}",
            found=f"the logical devices of this process are {', '.join(map(short, there))}",
            remedy="Name one of them, or make more with toolkit.devices.configure(gpus=...)",
        )
    return found[0]  # This process's own devices come first.


def short(name: str) -> str:
    """Returns a device's short name: "GPU:0", or "worker:1 CPU:0" for another task's."""
    parts = dict(part.split(":", 1) for part in name.strip("/").split("/") if ":" in part)
    local = parts.get("job", "localhost") == "localhost"
    where = "" if local else f"{parts['job']}:{parts.get('task', '0')} "
    return where + parts.get("device", name)
