"""What of Keras's is known to compute each example for itself, so that nobody looks at its graph.

The list is closed: it has pairs of a class and a check of how one of that very class was configured. Not trusted are
subclasses, anything that holds a function or an object of a script's, anything that computes along the axis of the
examples, and wrappers around what isn't trusted itself. Whatever isn't trusted is traced, as what a script has written
is; so a mistake that leaves something out costs time, and one that takes something in costs right numbers.

What a recurrent layer calls in its loop can't be seen in the layer's graph. A function or a cell of a script's in
there is therefore traced alone, for one step: if that keeps the examples apart, the loop does.
"""

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.step.rows import Graph, Rows
from toolkit.strategies.upstream import private
from toolkit.support.graphs import outside


class Trust(NamedTuple):
    """On which conditions one of a class is trusted.

    Attributes:
        rank: How many axes each tensor must have that it is given; with fewer, its last axis may be the examples'.
        also: A further check of how it was configured.
        wraps: The attributes with what it calls: cells, layers.
        alone: Of a recurrent layer's cell, the functions that it calls in the loop.
    """

    rank: int = 2
    also: Callable[[Any], bool] = lambda _: True
    wraps: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


# The list. Names that this version of Keras doesn't have are left out.


def _counts_nothing(layer: Any) -> bool:
    """Whether a lookup returns a number for each that it is given; counts of the last axis need an axis more."""
    return layer.output_mode in ("int", "one_hot")


def _pads_to_a_length(layer: Any) -> bool:
    """Whether texts aren't padded to the longest of the batch, and are split by Keras."""
    functions = (layer._standardize, layer._split)
    return layer.get_config()["output_sequence_length"] is not None and not any(callable(each) for each in functions)


def _draws_by_row(layer: Any) -> bool:
    shape = layer.noise_shape
    return shape is None or (len(shape) > 0 and shape[0] is None)


def _keeps_first_letter(layer: Any) -> bool:
    """Whether an equation's first axis is the first of the result, and no weight has it."""
    given, _, made = layer.equation.replace(" ", "").partition("->")
    x, _, kernel = given.partition(",")
    if x.startswith("..."):  # The examples' axis is among these only if there are more axes than letters.
        rank = layer.input_spec.ndim if layer.input_spec is not None else 0
        return rank > len(x) - len("...") and made.startswith("...") and "..." not in kernel
    return made[:1] == x[:1] and x.count(x[0]) == made.count(x[0]) == 1 and x[0] not in kernel


def _attends_within(layer: Any) -> bool:
    return all(axis > 0 for axis in layer._attention_axes or ())


_LAYERS: dict[Trust, str] = {
    # Each entry for itself, or moved within its example. The layers of a model are called as layers are, and looked at
    # one by one.
    Trust(rank=1): "Functional Sequential Add Average Embedding Flatten GaussianDropout GaussianNoise AlphaDropout "
    "Identity ActivityRegularization LeakyReLU ELU ReLU PReLU Maximum Minimum Multiply Rescaling Subtract",
    Trust(rank=0): "InputLayer",  # Nobody calls it.
    Trust(rank=1, also=_draws_by_row): "Dropout",
    Trust(rank=1, also=_counts_nothing): "Hashing IntegerLookup StringLookup Discretization HashedCrossing",
    Trust(rank=1, also=_pads_to_a_length): "TextVectorization",
    # Along other axes than the examples'.
    Trust(): "Activation BatchNormalization CategoryEncoding Concatenate Dense Dot GroupNormalization Hashing "
    "HashedCrossing IntegerLookup LayerNormalization Masking MelSpectrogram Normalization Permute RMSNormalization "
    "RepeatVector Reshape ReversibleEmbedding Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D StringLookup "
    "Discretization UnitNormalization AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D "
    "AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D "
    "Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose Cropping1D Cropping2D Cropping3D "
    "DepthwiseConv1D DepthwiseConv2D GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D "
    "GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D MaxPooling1D MaxPooling2D MaxPooling3D SeparableConv1D "
    "SeparableConv2D UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D",
    Trust(also=_keeps_first_letter): "EinsumDense",
    Trust(rank=3): "AdditiveAttention Attention GroupQueryAttention",
    Trust(rank=3, also=_attends_within): "MultiHeadAttention",
    # A picture without the axis of the examples would be one whose rows of pixels are taken for them.
    Trust(rank=4): "AugMix AutoContrast CenterCrop ContrastLimitedAdaptiveHistogramEqualization Equalization "
    "RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop "
    "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue RandomInvert "
    "RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear "
    "RandomTranslation RandomZoom Resizing Solarization",
    # Around others.
    Trust(rank=1, wraps=("layer",)): "SpectralNormalization",
    Trust(wraps=("layer",)): "TimeDistributed",
    Trust(wraps=("forward_layer", "backward_layer")): "Bidirectional",
    Trust(wraps=("cell",)): "ConvLSTM1D ConvLSTM2D ConvLSTM3D GRU LSTM RNN SimpleRNN",
    Trust(wraps=("cells",)): "StackedRNNCells",
    Trust(alone=("activation",)): "SimpleRNNCell",
    Trust(alone=("activation", "recurrent_activation")): "GRUCell LSTMCell ConvLSTMCell",
}


# Losses and metrics compute along the predictions' last axis. With one axis that is the examples'.
_LOSSES: dict[Trust, str] = {
    Trust(): "BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy "
    "CategoricalGeneralizedCrossEntropy CategoricalHinge CosineSimilarity Hinge Huber KLDivergence LogCosh "
    "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson "
    "SparseCategoricalCrossentropy SquaredHinge",
}


def _ranks_nothing(metric: Any) -> bool:
    return metric.top_k is None


def _compares_classes(metric: Any) -> bool:
    """Whether predictions are numbers of classes, and no scores of all of them along an axis."""
    return bool(metric.sparse_y_true and metric.sparse_y_pred)


_METRICS: dict[Trust, str] = {
    Trust(rank=1): "AUC Accuracy BinaryAccuracy FalseNegatives FalsePositives Mean PrecisionAtRecall RecallAtPrecision "
    "RootMeanSquaredError SensitivityAtSpecificity SpecificityAtSensitivity Sum TrueNegatives TruePositives",
    Trust(rank=1, also=_ranks_nothing): "Precision Recall",
    Trust(rank=1, also=_compares_classes): "BinaryIoU IoU MeanIoU",
    Trust(): "BinaryCrossentropy BinaryIoU CategoricalAccuracy CategoricalCrossentropy CategoricalHinge "
    "CosineSimilarity Hinge IoU KLDivergence LogCoshError MeanAbsoluteError "
    "MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanSquaredError MeanSquaredLogarithmicError OneHotIoU "
    "OneHotMeanIoU Poisson Precision R2Score Recall SparseCategoricalAccuracy SparseCategoricalCrossentropy "
    "SparseTopKCategoricalAccuracy SquaredHinge TopKCategoricalAccuracy",
}
_REGULARIZERS: dict[Trust, str] = {Trust(rank=1): "L1 L1L2 L2"}  # They add up entries.

# Functions that a layer, a loss or a metric may hold. Those of losses and metrics have a value for each example.
_FUNCTIONS = {
    keras.activations: "celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear "
    "log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus "
    "sparse_sigmoid sparsemax squareplus tanh tanh_shrink threshold",
    private.losses: "binary_crossentropy binary_focal_crossentropy categorical_crossentropy "
    "categorical_focal_crossentropy categorical_generalized_cross_entropy categorical_hinge cosine_similarity ctc "
    "hinge huber kl_divergence log_cosh "
    "mean_absolute_error mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error poisson "
    "sparse_categorical_crossentropy squared_hinge",
    private.accuracy_metrics: "accuracy binary_accuracy categorical_accuracy sparse_categorical_accuracy "
    "sparse_top_k_categorical_accuracy top_k_categorical_accuracy",
    private.regression_metrics: "cosine_similarity",
}


def is_by_row(layer: Any, given: Iterable[Any] = ()) -> bool:
    """Returns whether a layer computes each example for itself, as is known without its graph.

    Args:
        layer: Any.
        given: The tensors that it is called with.
    """
    tensors = list(given)
    # Those of masks are no axes of what a layer computes with.
    ranks = [x.shape.rank for x in tensors if x.dtype != tf.bool and x.shape.rank != 0]
    return have_as_many_rows(tensors) and _is_trusted(layer, ranks)


def have_as_many_rows(tensors: Iterable[Any]) -> bool:
    """Returns whether no tensor has as many rows as the batch because a script has written that number out.

    Of a batch of any size such a tensor has other rows than what stands beside it: all of them on each replica.

    Args:
        tensors: What something is given that computes by row, with shapes as they are when it is traced.
    """
    return len({x.shape[0] for x in tensors if x.shape.rank} - {1}) <= 1


def has_value_by_row(loss: keras.losses.Loss, predictions: Any) -> bool:
    """Returns whether a loss has a value for each example, as is known without its graph.

    Args:
        loss: Any; before its reduction.
        predictions: What it is given, in any structure. Labels may have one axis less.
    """
    return _is_trusted(loss, _ranks(predictions))


def adds_by_row(metric: keras.Metric, predictions: Any) -> bool:
    """Returns whether a metric's state is a sum over examples, as is known without its graph.

    Args:
        metric: Any.
        predictions: What it is given, in any structure.
    """
    return _is_trusted(metric, _ranks(predictions))


def _ranks(given: Any) -> list[int | None]:
    return [each.shape.rank for each in keras.tree.flatten(given) if tf.is_tensor(each)]


def _is_trusted(thing: Any, ranks: Sequence[int | None]) -> bool:
    """Whether a layer, loss, metric or regularizer is on the list, and computes along no axis of the examples.

    Args:
        thing: Any.
        ranks: How many axes each tensor has that it is given; None for one of which that isn't known.
    """
    if type(thing).__module__.startswith("toolkit."):
        return True  # Ours, whose replicas exchange what they need.
    if type(thing) not in _list() or not _holds_nothing_of_a_script(thing):
        return False
    if isinstance(thing, keras.Model):
        # There may be operations between its layers, such as keras.ops.mean.
        within = [*thing.layers, *(getattr(thing, "operations", None) or ())]
        return all(isinstance(each, keras.layers.Layer) and _is_trusted(each, ()) for each in within)
    ranks = ranks or _ranks_of_calls(thing)
    least = min((rank or 0 for rank in ranks), default=0)  # 0: it may be called with anything.
    return _is_along_others(thing, ranks) and any(least >= way.rank and way.also(thing) for way in _list()[type(thing)])


def _is_along_others(thing: Any, ranks: Iterable[int | None]) -> bool:
    """Whether no axis that something computes along is the examples', in tensors of so many axes."""
    axes = _axes(thing)
    if not isinstance(thing, keras.layers.Layer):  # Keras drops axes of labels and predictions by their sizes.
        return set(axes) <= {-1}
    return all(axis % rank for axis in axes for rank in ranks if rank)


@functools.cache
def _list() -> dict[type, tuple[Trust, ...]]:
    spaces = (
        (keras.layers, keras, private.functional, private.conv_lstm),
        (keras.losses, private.losses),
        (keras.metrics,),
    )
    found: dict[type, tuple[Trust, ...]] = {private.losses.LossFunctionWrapper: (Trust(),)}
    for table, where in zip((_LAYERS, _LOSSES, _METRICS, _REGULARIZERS), (*spaces, (keras.regularizers,)), strict=True):
        for way, names in table.items():
            for name in names.split():
                kind = next((vars(each)[name] for each in where if name in vars(each)), None)
                if kind is not None:
                    found[kind] = (*found.get(kind, ()), way)
    return found


@functools.cache
def _functions() -> frozenset[int]:
    """The functions on the list, by their ids: a script may give its own the same name."""
    found = [vars(module).get(name) for module, names in _FUNCTIONS.items() for name in names.split()]
    return frozenset(id(each) for each in found if each is not None)


# Optimizers that update each element of a variable by that element's own gradients and state, and by scalars.
_OPTIMIZERS = "Adadelta Adagrad Adam AdamW Adamax Ftrl Lion Nadam RMSprop SGD ScheduleFreeAdamW"


def is_elementwise(optimizer: Any) -> bool:
    """Returns whether an optimizer updates each element of a variable by itself, so that it may be given parts.

    Args:
        optimizer: Of Keras, or a script's own. The class of such a one says so by an attribute `elementwise`, unless it
            changes nothing but its arguments.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    if hasattr(optimizer, "elementwise"):
        return bool(optimizer.elementwise)
    listed = {vars(keras.optimizers).get(name) for name in _OPTIMIZERS.split()}
    for kind in type(optimizer).__mro__:
        if kind in listed:
            return True
        changed = {name for name in vars(kind) if hasattr(keras.optimizers.Optimizer, name) and name[:2] != "__"}
        if changed - {"get_config", "from_config"}:
            return False
    return False


def check_elementwise(optimizer: Any, *, asked: str, found: str, option: str) -> None:
    """Checks that an optimizer updates each element by itself.

    Args:
        optimizer: A Keras optimizer.
        asked: What needs that.
        found: What goes wrong otherwise.
        option: The argument that asks for it.

    Raises:
        StrategyError: It doesn't, or isn't known to.
    """
    if not is_elementwise(optimizer):
        raise StrategyError(
            asked=f"{asked} with {type(optimizer).__name__}",
            found=found,
            remedy=f"Use one that updates each element by itself, such as AdamW, or leave {option} out; if this one "
            "does, set elementwise = True in its class",
        )


# What a layer, loss or metric of Keras's holds.


_OF_WEIGHTS = ("_initializer", "_constraint", "_regularizer")  # The ends of names of what never sees an example.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(np.generic, np.ndarray, np.dtype, tf.DType, tf.TensorShape),
    *(tf.Tensor, tf.SparseTensor, tf.RaggedTensor, tf.Variable, tf.distribute.DistributedValues, tf.random.Generator),
    *(
        keras.Variable,
        keras.KerasTensor,
        keras.InputSpec,
        keras.DTypePolicy,
        keras.Quantizer,
        keras.random.SeedGenerator,
    ),
    *(tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable),
    *(keras.initializers.Initializer, keras.constraints.Constraint, private.DynamicBackend),
)


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    """The attributes that any layer or metric has, and that say nothing of what it computes."""
    plain = keras.layers.Identity() if issubclass(kind, keras.layers.Layer) else keras.metrics.Metric(name="plain")
    return frozenset(vars(plain)) - {"activity_regularizer", "_metrics"}


def _holds_nothing_of_a_script(thing: Any) -> bool:
    """Whether one of a class on the list has nothing in it that a script has made, at any depth."""
    if not isinstance(thing, (keras.layers.Layer, keras.Metric)):
        return all(_is_plain(each) for each in vars(thing).values())
    if isinstance(thing, keras.Model):
        return "call" not in vars(thing)
    way = _list()[type(thing)][0]
    names = _own_names(keras.layers.Layer if isinstance(thing, keras.layers.Layer) else keras.Metric)
    for name, value in vars(thing).items():
        if name in way.wraps:
            kept = all(_is_wrapped_by_row(thing, each) for each in (value if isinstance(value, list) else [value]))
        elif name in names or name.startswith("_self_") or name.endswith(_OF_WEIGHTS) or _is_plain(value):
            kept = True
        else:
            kept = name in way.alone and _keeps_rows(thing, value, value, _output_shape(thing))
        if not kept:
            return False
    return _is_plain(getattr(thing, "activity_regularizer", None))


def _is_plain(value: Any) -> bool:
    """Whether a value is data, or something of Keras's on the list. A model may be of anything."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (keras.layers.Layer, keras.Metric, keras.losses.Loss, keras.Regularizer)):
        listed = type(value) in _list() and not isinstance(value, keras.Model)
        return listed and _holds_nothing_of_a_script(value)
    if isinstance(value, _PLAIN):
        return True
    ours = isinstance(value, functools.partial) and value.func.__module__.startswith("toolkit.")
    return ours or id(value) in _functions() or (inspect.isclass(value) and issubclass(value, np.generic))


def _axes(thing: Any) -> list[int]:
    held = {**vars(thing), **vars(thing).get("_fn_kwargs", {})}
    found = [held.get(each) for each in ("axis", "axes", "dims")]
    flat = [each for axes in found for each in (axes if isinstance(axes, (list, tuple)) else [axes])]
    return [each for each in flat if isinstance(each, int)]


def _ranks_of_calls(layer: Any) -> list[int | None]:
    """How many axes what a layer is called with has, as far as its model shows."""

    def ranks(shape: Any) -> Iterator[int]:
        if isinstance(shape, dict):
            yield from (rank for each in shape.values() for rank in ranks(each))
        elif isinstance(shape, (tuple, list)) and all(each is None or isinstance(each, int) for each in shape):
            yield len(shape)
        elif isinstance(shape, (tuple, list)):
            yield from (rank for each in shape for rank in ranks(each))

    called = [x for node in getattr(layer, "_inbound_nodes", ()) for x in node.input_tensors if x.dtype != "bool"]
    return [*ranks(getattr(layer, "_build_shapes_dict", None) or {}), *(len(each.shape) for each in called)]


# What a loop or a wrapper calls, traced alone.


# By what is called, and the shapes that it is called with, whether it computes each example for itself.
_ALONE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def traced(function: Callable[..., Any], given: Any) -> list[Rows] | None:
    """Returns what a function's results are of tensors like the given ones with any number of rows.

    Args:
        function: Takes the tensors, in their structure.
        given: Tensors or specifications, in any structure. Their values and first dimensions don't matter.

    Returns:
        None where that can't be told: the function raises, returns None, adds to a loss, or sets a variable to what
        depends on the rows.
    """

    def like(leaf: Any) -> Any:
        if not tf.is_tensor(leaf) and not isinstance(leaf, tf.TensorSpec):
            return leaf
        if not isinstance(leaf, (tf.Tensor, tf.TensorSpec)):  # Ragged or sparse.
            raise TypeError(type(leaf))
        shape = leaf.shape.as_list() if leaf.shape.rank is not None else None
        return tf.compat.v1.placeholder(leaf.dtype, [None, *shape[1:]] if shape else shape)

    def trace() -> list[Rows] | None:
        graph = tf.__internal__.FuncGraph("trial")
        with graph.as_default(), keras.StatelessScope(collect_losses=True) as scope:
            results = function(keras.tree.map_structure(like, given))
            if results is None or scope.losses:
                return None
            results = [tf.convert_to_tensor(each) for each in keras.tree.flatten(results)]
        known = Graph(graph)
        changed = [known[each] for each in scope.state_mapping.values()] + [value for _, value in known.assigned]
        return [known[each] for each in results] if all(each.is_alike for each in changed) else None

    try:
        return outside(trace)
    except Exception:  # A script's own function may raise anything on tensors without values.
        return None


def _keeps_rows(holder: Any, thing: Any, call: Callable[[Any], Any], given: Any) -> bool:
    """Whether what is in a layer computes each example for itself, as its own graph shows.

    Args:
        holder: The layer, which is built.
        thing: A function or a layer.
        call: Calls it with tensors of the given structure.
        given: Specifications of them; None if their shapes aren't known.
    """
    if given is None or not holder.built:
        return False
    try:
        known = _ALONE.setdefault(thing, {})
    except TypeError:  # It can't be referred to weakly.
        known = {}
    key = str(keras.tree.flatten(given))
    if key not in known:
        found = traced(call, given)
        known[key] = found is not None and all(each.in_order for each in found)
    return known[key]


def _output_shape(cell: Any) -> tf.TensorSpec:
    """What a recurrent cell calls its activations with: pictures in a convolutional one, else vectors."""
    size = getattr(cell, "filters", None)
    axes = [None] * cell.rank if size is not None else []
    last = getattr(cell, "data_format", None) != "channels_first"
    shape = [*axes, size or cell.units] if last else [size or cell.units, *axes]
    return tf.TensorSpec([None, *shape], cell.compute_dtype)


def _built_with(layer: Any) -> Sequence[int | None] | None:
    """The shape of the first input that a layer was built for; None if it has none, or several."""
    shape = next(iter((getattr(layer, "_build_shapes_dict", None) or {}).values()), None)
    flat = isinstance(shape, (tuple, list)) and all(each is None or isinstance(each, int) for each in shape)
    return shape if flat else None


def _is_wrapped_by_row(wrapper: Any, inner: Any) -> bool:
    """Whether a cell or a layer in a wrapper computes each example for itself."""
    listed = _is_plain(inner)
    if isinstance(wrapper, keras.layers.TimeDistributed):
        shape = _built_with(wrapper)
        if shape is None:
            return False
        given = tf.TensorSpec([None, *shape[2:]], wrapper.compute_dtype)
        return (listed and _is_trusted(inner, [len(shape) - 1])) or _keeps_rows(wrapper, inner, inner.call, given)
    if not isinstance(wrapper, (keras.layers.RNN, keras.layers.StackedRNNCells)) or listed:
        return listed
    return _is_cell_by_row(wrapper, inner)


def _is_cell_by_row(wrapper: Any, cell: Any) -> bool:
    """Whether a cell of a script's computes each example for itself: results, new states, and those to begin with."""
    shape = _built_with(wrapper)
    sizes = cell.state_size if isinstance(cell.state_size, (tuple, list)) else [cell.state_size]
    if shape is None or not all(isinstance(size, int) for size in sizes):
        return False
    kind = getattr(cell, "compute_dtype", wrapper.compute_dtype)
    x = tf.TensorSpec([None, *shape[2 if isinstance(wrapper, keras.layers.RNN) else 1 :]], kind)

    def step(given: Any) -> Any:
        x, states = given
        first = getattr(cell, "get_initial_state", None)
        begin = first(batch_size=tf.shape(x)[0]) if first is not None else []
        return cell(x, states), begin

    return _keeps_rows(wrapper, cell, step, (x, [tf.TensorSpec([None, size], kind) for size in sizes]))
