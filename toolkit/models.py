"""Models: three for CIFAR-10, by name, in pure Keras; a user's, from a function or a file.

One of ours is `Sequential([Input, trunk, head])`; `model.get_layer("trunk")` and `model.get_layer("head")` give the two
parts, which want different kinds of parallelism: the trunk does most of the arithmetic with few parameters, the head
the reverse (Krizhevsky, arXiv 1404.5997).

small_cnn: three convolutions and one hidden FC layer, 357 thousand parameters, minutes on a CPU.

alexnet: AlexNet for 32x32 pictures, five convolutions, two FC layers of 4,096 units, 36 million parameters. Krizhevsky,
Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, with strides and kernels for
pictures of 32x32, and batch normalisation for its local response normalisation. The trunk does 83 % of the arithmetic
with 6 % of the parameters (counted in tests/models/test_models.py).

vit: a vision transformer, patches of 4x4, four blocks of four heads, 798 thousand parameters. Dosovitskiy et al., "An
Image is Worth 16x16 Words", arXiv 2010.11929, with normalisation before each part of a block. A depthwise convolution
over the patches says where they are, in the place of a table of positions, and their mean is classified: Chu et al.,
"Conditional Positional Encodings for Vision Transformers", arXiv 2102.10882.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.strategies.upstream.wrapping import instead
from toolkit.support.words import did_you_mean, nearest

if TYPE_CHECKING:
    import keras

__all__ = ["NAMES", "build", "open_model"]

NAMES = ("small_cnn", "alexnet", "vit")


def build(
    name: str, *, classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3), dropout: float = 0.0
) -> "keras.Sequential":
    """Builds a model with all variables; call it under the strategy's scope.

    Args:
        name: One of `NAMES`.
        classes: Number of outputs.
        input_shape: (height, width, channels) of the uint8 pictures.
        dropout: Share of the units dropped before FC layers in training, in [0, 1).

    Returns:
        A model from uint8 or float pictures [batch, height, width, channels], values 0 to 255, to float32 logits
        [batch, classes].

    Raises:
        ModelError: The name is unknown, or an argument is out of its range.
    """
    ModelError.check_choice(name, NAMES, asked=f"model={name!r}", found="there is no model of that name")
    if not 0 <= dropout < 1:
        raise ModelError(
            asked=f"dropout={dropout} drops that share of the units",
            found="it is not in [0, 1)",
            remedy="Give 0 to switch it off",
        )
    import keras

    trunk, head = _PARTS[name]
    return keras.Sequential([keras.Input(input_shape), trunk(input_shape), head(classes, dropout)], name=name)


def _small_cnn_trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
    """Convolutions of 32, 64 and 128 filters, each normalised and pooled: [32, 32, 3] to [2048]."""
    from keras import Input, Sequential, layers

    # The mean of pictures is 121, their deviation 64.
    parts: list = [Input(input_shape), layers.Rescaling(1 / 64, offset=-1.9)]
    for number, filters in enumerate((32, 64, 128), start=1):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}"),
            layers.BatchNormalization(momentum=0.9, name=f"norm{number}"),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]
    return Sequential([*parts, layers.Flatten()], name="trunk")


def _small_cnn_head(classes: int, dropout: float) -> "keras.Sequential":
    """One hidden layer of 128 units: [2048] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dense(128, activation="relu", name="fc1")]
    if dropout:
        parts.append(layers.Dropout(dropout))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc2")], name="head")


def _alexnet_trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
    """Five 3x3 convolutions and three poolings: [32, 32, 3] to [4096]."""
    from keras import Input, Sequential, layers

    parts: list = [Input(input_shape), layers.Rescaling(1 / 64, offset=-1.9)]
    stages = ((64, True), (192, True), (384, False), (256, False), (256, True))
    for number, (filters, pool) in enumerate(stages, start=1):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}"),
            layers.BatchNormalization(momentum=0.9, name=f"norm{number}"),
            layers.Activation("relu"),
        ]
        if pool:
            parts.append(layers.MaxPooling2D())
    return Sequential([*parts, layers.Flatten()], name="trunk")


def _alexnet_head(classes: int, dropout: float) -> "keras.Sequential":
    """Two hidden layers of 4,096 units: [4096] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = []
    for number in (1, 2):
        if dropout:
            parts.append(layers.Dropout(dropout))
        parts.append(layers.Dense(4096, activation="relu", name=f"fc{number}"))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc3")], name="head")


_PATCH, _FEATURES, _HEADS, _BLOCKS = 4, 128, 4, 4


def _vit_trunk(input_shape: tuple[int, int, int]) -> "keras.Model":
    """Patches as words, and four blocks of attention and FC layers: [height, width, channels] to [128]."""
    import keras
    from keras import layers

    inputs = keras.Input(input_shape)
    x = layers.Rescaling(1 / 64, offset=-1.9)(inputs)
    x = layers.Conv2D(_FEATURES, _PATCH, strides=_PATCH, padding="same", name="patches")(x)
    places = layers.DepthwiseConv2D(3, padding="same", name="places")(x)
    x = layers.Add()([layers.Reshape((-1, _FEATURES))(each) for each in (x, places)])
    for number in range(1, _BLOCKS + 1):
        y = layers.LayerNormalization(epsilon=1e-6, name=f"norm{number}a")(x)
        y = layers.MultiHeadAttention(_HEADS, _FEATURES // _HEADS, name=f"attention{number}")(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization(epsilon=1e-6, name=f"norm{number}b")(x)
        y = layers.Dense(4 * _FEATURES, activation="gelu", name=f"up{number}")(y)
        x = layers.Add()([x, layers.Dense(_FEATURES, name=f"down{number}")(y)])
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(x), name="trunk")


def _vit_head(classes: int, dropout: float) -> "keras.Sequential":
    """One layer: [128] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dropout(dropout)] if dropout else []
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc")], name="head")


_PARTS = {
    "small_cnn": (_small_cnn_trunk, _small_cnn_head),
    "alexnet": (_alexnet_trunk, _alexnet_head),
    "vit": (_vit_trunk, _vit_head),
}


def open_model(text: str, *, stop_at: Sequence[tuple[type, str]] = ()) -> "keras.Model":
    """Returns the model that a text names.

    Args:
        text: One of `NAMES`; "module:function" or "file.py:function", of a function that returns a model and needs no
            argument; or the path of a .keras file, which is opened in Keras's safe mode. A function that has a
            parameter `weights`, as those of keras.applications, is called with weights=None: else it downloads some.
        stop_at: Methods with which training begins, besides a model's own, as class and name: a script is run up to the
            first call of one.

    Raises:
        ModelError: There is none, or it can't be had without running code of the file.
    """
    if text in NAMES:
        return build(text)
    file, _, function = text.rpartition(":")
    if file.endswith(".py") and pathlib.Path(file).is_file():
        return _called(_imported(pathlib.Path(file)), function, stop_at=stop_at, asked=f"model {text}")
    try:
        if text.endswith((".keras", ".h5")) or os.path.sep in text or pathlib.Path(text).exists():
            return _loaded(pathlib.Path(text).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # A name of 300 letters, ~nobody, a NUL character.
        found = getattr(error, "strerror", None) or str(error)
        raise ModelError(asked=f"model {text!r}", found=found, remedy="Give the path of a .keras file") from None
    if ":" in text:
        return _called(*text.split(":", 1), stop_at=stop_at, asked=f"model {text}")
    raise ModelError(
        asked=f"model {text!r}",
        found="there is no model of that name, and it is neither module:function nor a file",
        remedy=f"Give {', '.join(NAMES)}, or such as net.py:build_model, or the path of a .keras file",
    )


def _loaded(path: pathlib.Path) -> Any:
    asked = f"the model in {path}"
    if not path.is_file():
        raise ModelError(asked=asked, found="there is no such file", remedy="Name one that model.save() has written")
    if not zipfile.is_zipfile(path):
        raise ModelError(
            asked=asked,
            found="it isn't a .keras file",
            remedy='Write one with model.save("model.keras")',
        )
    import keras

    try:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        text = " ".join(str(error).split())
        if "safe_mode" in text or "unsafe" in text:
            raise ModelError(
                asked=asked,
                found="opening it would run Python code in the file, such as a Lambda layer's",
                remedy="If you trust the model's code, give the module:function that builds it instead",
            ) from None
        raise ModelError(
            asked=asked,
            found=f"Keras can't open it: {text[:200].rstrip('.')}",
            remedy="Where it has your own classes, give module:function instead of the file",
        ) from None


def _imported(path: pathlib.Path) -> str:
    """Returns the module name of a file; its directory becomes the first in Python's search path."""
    sys.path.insert(0, str(path.resolve().parent))
    return path.stem


def _called(module: str, function: str, *, stop_at: Sequence[tuple[type, str]], asked: str) -> Any:
    if (here := str(pathlib.Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does.
    import keras

    try:
        _check_defined(module, function, asked)
        with _nothing_trained(stop_at):
            made = _module(module)
        found = getattr(made, function)
    except ImportError as error:
        raise ModelError(asked=asked, found=str(error), remedy="Start where the module can be imported") from None
    except AttributeError:
        raise ModelError(
            asked=asked, found=f"the module has no {function}", remedy="Name a function that returns a model"
        ) from None
    try:
        with _nothing_trained(stop_at):
            model = _call(found) if callable(found) and not isinstance(found, keras.Model) else found
    except _Trains:
        raise ModelError(
            asked=asked, found="it trains a model", remedy="Name a function that makes one and returns it untrained"
        ) from None
    except TypeError as error:
        raise ModelError(asked=asked, found=str(error), remedy="Name a function that takes no arguments") from None
    if not isinstance(model, keras.Model):
        raise ModelError(
            asked=asked, found=f"it gives a {type(model).__name__}", remedy="Name a function that returns a keras.Model"
        )
    return model


def _check_defined(module: str, function: str, asked: str) -> None:
    """Refuses a name that a module's source doesn't have, before the module, which may be a long script, runs."""
    spec = importlib.util.find_spec(module) if module not in sys.modules else None
    if spec is None or not (spec.origin or "").endswith(".py"):
        return
    try:
        tree = ast.parse(pathlib.Path(str(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Importing it says what is wrong.
    nodes = list(ast.walk(tree))
    made = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    made |= {node.id for node in nodes if isinstance(node, ast.Name)}
    aliases = [each for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for each in node.names]
    made |= {(each.asname or each.name).partition(".")[0] for each in aliases}
    if made & {function, "*", "__getattr__", "globals", "setattr", "exec"}:  # Each may make names that aren't written.
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    raise ModelError(
        asked=asked,
        found=f"{pathlib.Path(str(spec.origin)).name} has no {function}"
        + (f"; its functions are {', '.join(functions)}" if functions else " and no other function"),
        remedy=did_you_mean(nearest(function, functions)) + "Name a function that makes a model and returns it",
    )


class _Trains(BaseException):
    """Training is about to begin. A script's `except Exception` doesn't catch it."""


@contextlib.contextmanager
def _nothing_trained(stop_at: Sequence[tuple[type, str]] = ()) -> Iterator[None]:
    """A context in which starting to train raises `_Trains`, and a script sees no arguments of this program."""
    import keras

    def stop(_: Callable) -> Callable:
        def trains(*_args: Any, **_kwargs: Any) -> None:
            raise _Trains

        return trains

    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        with contextlib.ExitStack() as several:
            for kind, name in ((keras.Model, "fit"), (keras.Model, "train_on_batch"), *stop_at):
                several.enter_context(instead(kind, name, stop))
            yield
    finally:
        sys.argv = arguments


def _module(name: str) -> types.ModuleType:
    """Imports a module; of a script that trains at import, the part before that."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name!r}")
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except _Trains:
        del sys.modules[name]
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _call(function: Any) -> Any:
    try:
        weighted = "weights" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # A built-in function has no source file.
        weighted = False
    return function(weights=None) if weighted else function()
