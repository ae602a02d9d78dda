"""A model's inputs: the shapes and dtypes with which it can be called."""

from collections.abc import Callable, Sequence
from typing import Any

from toolkit.errors import ModelError
from toolkit.parallel.graph import is_graph

__all__ = ["check", "specs_of"]


def check(model: Any) -> None:
    """Raises ModelError unless this is a built Keras model."""
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(
            asked="a plan is made for a Keras model",
            found=f"this is a {type(model).__name__}",
            remedy="Give a keras.Model",
        )
    if not model.built:
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found="it isn't built, so its layers have no shapes yet",
            remedy="Begin it with keras.Input(shape), call model.build(shape), or call it once on a batch",
        )


def specs_of(model: Any, length: int | None, *, examples: int) -> tuple[list, Callable[[list], tuple]]:
    """Returns a model's input shapes and dtypes as a flat list, and a function that makes (args, kwargs) of tensors."""
    import keras
    import tensorflow as tf

    def spec(shape: Sequence, dtype: str) -> Any:
        fixed = is_graph(model) and shape[0] is not None
        sizes = [length if size is None else size for size in shape[1:]]
        return tf.TensorSpec([shape[0] if fixed else examples, *sizes], dtype)

    if is_graph(model):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        flat = keras.tree.flatten(inputs)
        specs = [spec(each.shape, each.dtype) for each in flat]
        return specs, lambda tensors: ([keras.tree.pack_sequence_as(inputs, tensors)], {})
    config = model.get_build_config() or {}
    named = {name.removesuffix("_shape"): shape for name, shape in config.get("shapes_dict", {}).items()}
    shapes = named or config.get("input_shape")
    if shapes is None:
        raise ValueError("it doesn't say with what shapes it was built")
    # Indices of words may arrive as floats, which Keras's layers accept.
    dtype = keras.config.floatx()
    if named:
        return [spec(shape, dtype) for shape in named.values()], lambda tensors: (
            [],
            dict(zip(named, tensors, strict=True)),
        )
    if isinstance(shapes, dict):
        return [spec(shape, dtype) for shape in shapes.values()], lambda tensors: (
            [dict(zip(shapes, tensors, strict=True))],
            {},
        )
    if isinstance(shapes[0], (list, tuple)):
        return [spec(shape, dtype) for shape in shapes], lambda tensors: ([list(tensors)], {})
    return [spec(shapes, dtype)], lambda tensors: (tensors, {})
