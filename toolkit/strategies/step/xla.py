"""XLA in a step of several replicas: it compiles the arithmetic in pieces, and what replicas exchange stays outside.

Keras compiles a step as a whole, and XLA can't compile an exchange. So Keras's own step is traced in pieces here:

    forward pass, loss, backward pass and metrics    a piece on each replica
    the sum of the gradients over replicas           as without XLA
    what the optimizer does with it                  a piece on each replica

A piece is traced before anything runs. Where replicas would exchange something in it, as BatchNormalization does, or
where XLA can't compile one of its operations, the same is computed without XLA, and a message says why. With
`jit_compile=True` the calls of layers are pieces then, with TensorFlow's gradient of a compiled function, and so they
are in the user's own step. A step that sees the whole batch has no pieces.

A piece is traced as often as the step around it, once for any number of examples, and XLA compiles it once for each
number.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.devices.capability import build_info, support
from toolkit.devices.inventory import Gpu, take
from toolkit.devices.setup import cards_of
from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import private, replaced
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.support.graphs import outside

_LOG = logging.getLogger(__name__)
_AUTO = "_toolkit_auto_xla"
_ALONE = "_toolkit_xla_alone"
_EXCHANGES = ("Collective", "Nccl")
_INPUTS = ("Placeholder", "_Arg", "_Retval")  # Of a function's graph: no operations.
_STEPS = {"train_step": keras.Model.train_step, "test_step": keras.Model.test_step}
_ASK = "jit_compile=True compiles the calls of its layers"
_LONG = 10.0  # Seconds of a first step from which a message says how long it took.


def chooses(devices: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether `jit_compile="auto"` means XLA for several replicas: where all are GPUs of one host.

    Between hosts, gradients are exchanged while others are computed, and a piece returns all of its gradients at once.

    Args:
        devices: The names of this process's replicas' devices.
        hosts: The host of each process.
    """
    kinds = {tf.DeviceSpec.from_string(each).device_type for each in devices}
    return kinds == {"GPU"} and len(set(hosts)) <= 1


def choose(original: Callable, model: Any) -> bool:
    """Returns what `jit_compile="auto"` means for a model of ours: on one device, what it means without a strategy."""
    strategy = model._distribute_strategy
    own = vars(model)  # Avoids Keras's actions when an attribute is set.
    own["_distribute_strategy"] = None
    try:
        chosen = own[_ALONE] = original(model)
    finally:
        own["_distribute_strategy"] = strategy
    if hasattr(strategy, "replace_functions"):  # Parameter servers.
        return original(model)
    own[_AUTO] = True
    if not chosen:
        return False
    devices, hosts = _places(strategy)
    if strategy.extended._num_replicas_in_sync > 1 and not chooses(devices, hosts):
        return False
    # Processes of one host have to decide alike, so they look at all of its cards, and not only at their own.
    why = _why_not_on(take().gpus if len(hosts) > 1 else cards_of(devices))
    if why:
        _warn(why)
    return not why


def _why_not_on(cards: Iterable[Gpu]) -> str:
    """Returns why `jit_compile="auto"` doesn't mean XLA on these cards; "" if it may."""
    build = build_info()
    for card in cards:
        found = support(card.capability, build)
        if not found.xla and found.kernels != "left out":
            return f"{card.with_capability()}: {found.found}. {found.remedy}"
    return ""


@functools.lru_cache(maxsize=64)
def _warn(why: str) -> None:
    """Says it once in a process, which may compile many models."""
    _LOG.warning("%s", why)


def forget_choice(model: Any) -> None:
    """Makes the `compile` of a model that comes next tell whether XLA is the user's own wish."""
    model.jit_compile  # noqa: B018 - Keras reads it when it sets it, and an unset one asks `choose`.
    vars(model).pop(_AUTO, None)
    vars(model).pop(_ALONE, None)


def turn_off(model: Any) -> None:
    """Has a model's steps computed without XLA, though they aren't on one device."""
    model.jit_compile = False
    vars(model)[_ALONE] = True


def compiled_alone(model: Any) -> bool:
    """Returns whether XLA compiles a model's steps on one device, whatever it does here."""
    return not tf.executing_eagerly() and meant_alone(model)


def meant_alone(model: Any) -> bool:
    """Returns whether XLA compiles a model's functions on one device."""
    asked = model.jit_compile or vars(model).get(_ALONE, False)
    return bool(asked) and private.model_supports_jit(model)


def _places(strategy: tf.distribute.Strategy) -> tuple[Sequence[str], list[str]]:
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict() if resolver is not None else {}
    tasks = [each for job in ("chief", "worker") for each in cluster.get(job, [])]
    return strategy.extended.worker_devices, [each.rpartition(":")[0] for each in tasks]


@contextlib.contextmanager
def kept_out(model: Any) -> Iterator[None]:
    """A context in which Keras makes a step function that XLA doesn't compile as a whole."""
    own = vars(model)
    before = own["_jit_compile"]
    own["_jit_compile"] = False
    try:
        yield
    finally:
        own["_jit_compile"] = before


def time_first(model: Any, function: StepFunction) -> None:
    """Has a step function say how long its first call took, if XLA compiles parts of it and that is long."""

    def timed(within: Callable, batches: Any) -> Any:
        function.put(Around.TIMING, None)
        began = time.monotonic()
        found = within(batches)
        if (took := time.monotonic() - began) > _LONG:
            _LOG.info(
                "The first step took %.0f s: it was traced, and XLA compiled it. The next ones begin at once", took
            )
        return found

    function.put(Around.TIMING, timed if model.jit_compile else None)


class Use:
    """How a model uses XLA in the step being traced.

    Args:
        model: The model.

    Attributes:
        asked: Whether the user has asked for XLA, and didn't leave the choice to Keras.
        layers: Whether the calls of layers are pieces.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.asked = not vars(model).get(_AUTO, False)
        self.layers = False
        replaced.LAYER.answer(xla=_call_layer)

    def say(self, why: str) -> None:
        """Says once what of a model's steps is computed without XLA, and why."""
        said = vars(self._model).setdefault("_toolkit_without_xla", set())
        if why not in said:
            said.add(why)
            _LOG.log(logging.WARNING if self.asked else logging.INFO, "%s: %s", self._model.name, why)


def use_of(model: Any) -> Use | None:
    """Returns how a model uses XLA in a step; None if it doesn't."""
    return (
        Use(model) if model.jit_compile and not tf.executing_eagerly() and private.model_supports_jit(model) else None
    )


class _NoPieceError(Exception):
    """Something can't be a piece; the message says why."""


class Piece:
    """What XLA is to compile, while it is traced.

    Args:
        name: Of the function.
        takes_updates: Whether optimizers are called after it.
        metrics_too: Whether metrics are a part of it.

    Attributes:
        updates: Each optimizer that the step has called, its gradients and their variables. It is called later.
        metrics: What `compute_metrics` was given, if it is called later.
        exchange: Where replicas would have exchanged something.
    """

    def __init__(self, name: str, *, takes_updates: bool = False, metrics_too: bool = True) -> None:
        self.name = name
        self.takes_updates = takes_updates
        self.metrics_too = metrics_too
        self.updates: list[tuple[Any, list, Any]] = []
        self.metrics: tuple[tuple, dict] | None = None
        self.exchange: str | None = None

    def refuse(self) -> None:
        """Ends the trace, where replicas are about to exchange something."""
        self.exchange = tf.get_current_name_scope() or "the loss"
        raise StrategyError(
            asked="XLA is to compile a part of a step",
            found=f"replicas exchange something in it, in {self.exchange}",
            remedy="The step does it without XLA",
        )


def in_pieces(model: Any, name: str, step: Callable, share: Any) -> Callable:
    """Returns a step that computes the same, as far as it can be in pieces.

    Args:
        model: Built and compiled.
        name: "train_step" or "test_step".
        step: The model's.
        share: This replica's share of the batch.
    """
    use = this_step.xla
    if use is None:
        return step
    own = getattr(step, "__func__", None) is not _STEPS[name]
    if own or type(model).compute_metrics is not keras.Model.compute_metrics or share.at_tape:
        if not use.asked:
            use.say(f"{name} is computed without XLA, as it uses code of the user's own. {_ASK}")
        use.layers = use.asked
        return step

    def computed(data: Any) -> Any:
        for metrics_too in (True, False):
            try:
                return _computed_in_pieces(model, step, data, metrics_too)
            except _NoPieceError as error:
                why = error
            # In a test step, nobody may have asked for it before.
            share.weight  # noqa: B018
        use.layers = use.asked
        layers = " as a whole, but layer by layer where it can be" if use.layers else ""
        use.say(f"{name} is computed without XLA{layers}: {why}")
        return step(data)

    return computed


def _computed_in_pieces(model: Any, step: Callable, data: Any, metrics_too: bool) -> Any:
    piece = Piece(getattr(step, "__name__", "step"), takes_updates=True, metrics_too=metrics_too)
    before = vars(model).get("compute_metrics")

    def arithmetic() -> Any:
        if not metrics_too:
            vars(model)["compute_metrics"] = functools.partial(_later, piece)
        try:
            logs = step(data)
        finally:
            if not metrics_too:
                del vars(model)["compute_metrics"]
                if before is not None:
                    vars(model)["compute_metrics"] = before
        return logs, [grads for _, grads, _ in piece.updates], piece.metrics

    logs, gradients, given = _compiled(arithmetic, piece)
    for (optimizer, _, variables), grads in zip(piece.updates, gradients, strict=True):
        optimizer.apply(grads, variables)
    return logs if given is None else model.compute_metrics(*given[0], **given[1])


def _later(piece: Piece, *args: Any, **kwargs: Any) -> dict:
    piece.metrics = args, kwargs
    return {}


def updated(update: Callable[[], Any]) -> bool:
    """Updates variables in a piece, and returns whether it could be one; if not, nothing has been updated."""
    try:
        _compiled(update, Piece("update"))
    except _NoPieceError as error:
        _LOG.debug("The update is computed without XLA: %s", error)
        return False
    return True


def predicted(original: Callable, use: Use | None) -> Callable:
    """Returns a model's `predict_step`, in a piece if that can be."""
    if use is None:
        return original

    def computed(model: Any, data: Any) -> Any:
        try:
            return _compiled(lambda: original(model, data), Piece("predict_step"))
        except _NoPieceError as error:
            use.say(f"predict_step is computed without XLA: {error}")
            return original(model, data)

    return computed


def _call_layer(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer, in a piece where the step's layers are pieces."""
    use = this_step.xla
    if not use.layers or this_step.piece is not None:
        return original(layer, *args, **kwargs)
    kept: list[list] = []

    def call() -> Any:
        found = original(layer, *args, **kwargs)
        kept[:] = [each for each in (vars(part).get("_losses") for part in layers_within(layer)) if each]
        return found, [list(each) for each in kept]

    try:
        found, losses = _compiled(call, Piece("layer"), differentiated=True)
    except _NoPieceError as error:
        use.say(f"{layer.name} is computed without XLA: {error}")
        with this_step.having(xla=None):
            return original(layer, *args, **kwargs)
    for mine, outer in zip(kept, losses, strict=True):
        mine[:] = outer
    return found


def _compiled(function: Callable[[], Any], piece: Piece, *, differentiated: bool = False) -> Any:
    """Returns what a function returns, in any structure, computed in a piece.

    Args:
        function: Takes nothing.
        piece: The piece, for what is traced of it.
        differentiated: Whether a tape may record it: the backward pass is another piece then.

    Raises:
        _NoPieceError: It can't be a piece. Nothing has been computed.
    """
    inner: list[Any] = []

    def body() -> list:
        graph = tf.compat.v1.get_default_graph()
        with this_step.having(piece=piece):
            found = tf.nest.map_structure(_tensor, function())
        made = [each for each in tf.nest.flatten(found, expand_composites=True) if _is_of(each, graph)]
        masks = [private.masking.get_keras_mask(each) for each in made]
        inner[:] = [found, made, masks]
        return [*made, *(each for each in masks if _is_of(each, graph))]

    body.__name__ = piece.name  # Which profiles show.
    traced = tf.function(body, autograph=False, jit_compile=True)
    try:
        graph = traced.get_concrete_function().graph
    except Exception as error:  # The user's own code may raise anything, and raises it again without XLA.
        if piece.exchange is not None:
            raise _NoPieceError(f"replicas exchange something in {piece.exchange}") from error
        raise _NoPieceError(str(error).partition("\n")[0] or type(error).__name__) from error
    _check(graph, differentiated)
    computed = iter(traced())
    found, made, masks = inner
    outer = {id(each): next(computed) for each in made}
    for each, mask in zip(made, masks, strict=True):
        if mask is not None:
            private.masking.set_keras_mask(outer[id(each)], next(computed) if _is_of(mask, graph) else mask)
        if this_step.noted is not None and id(each) in this_step.noted:
            this_step.noted[id(outer[id(each)])] = this_step.noted[id(each)]._replace(tensor=outer[id(each)])
    leaves = [outer.get(id(each), each) for each in tf.nest.flatten(found, expand_composites=True)]
    return tf.nest.pack_sequence_as(found, leaves, expand_composites=True)


def _tensor(leaf: Any) -> Any:
    kinds = (tf.Variable, keras.Variable, tf.distribute.DistributedValues)
    return tf.convert_to_tensor(leaf) if isinstance(leaf, kinds) else leaf


def _is_of(leaf: Any, graph: tf.Graph) -> bool:
    return isinstance(leaf, tf.Tensor) and not hasattr(leaf, "numpy") and leaf.graph is graph


def _check(graph: Any, differentiated: bool) -> None:
    """Raises unless XLA can compile all operations of a function."""
    types = {op.type for op in graph.get_operations()}
    definition = graph.as_graph_def()
    types |= {node.op for function in definition.library.function for node in function.node_def}
    functions = {function.signature.name for function in definition.library.function}
    types -= {*_INPUTS, *functions}
    met = sorted(each for each in types if each.startswith(_EXCHANGES))
    if met:
        raise _NoPieceError(f"replicas exchange something in it: {', '.join(met)}")
    if differentiated and any(each.startswith("TensorList") or each.endswith("While") for each in types):
        raise _NoPieceError("XLA can't hand what a loop computes to a backward pass of its own")
    unknown = sorted(each for each in types if not _compilable(each))
    if unknown:
        raise _NoPieceError(f"XLA can't compile {', '.join(unknown)}")


@functools.lru_cache(maxsize=1024)
def _compilable(operation: str) -> bool:
    _register_kernels()
    kinds = {each.device_type for each in private.get_registered_kernels_for_op(operation).kernel}
    return not kinds or any(each.startswith("XLA_") and each.endswith("_JIT") for each in kinds)


@functools.lru_cache(maxsize=1)
def _register_kernels() -> None:
    """Makes TensorFlow list XLA's kernels, which it does when it compiles for the first time."""

    def compile_something() -> None:
        with tf.device("CPU:0"):
            tf.function(lambda x: x + 1, jit_compile=True)(tf.zeros([]))

    outside(compile_something)
