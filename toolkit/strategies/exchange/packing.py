"""Packs several tensors into one, and unpacks it."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["joined", "shaped"]


def joined(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
    """Returns tensors of one dtype as one flat tensor, and a function that unpacks such a tensor."""

    def split(flat: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(flat, tf.stack([tf.size(each) for each in tensors]), num=len(tensors))
        return [shaped(part, each) for part, each in zip(parts, tensors, strict=True)]

    return tf.concat([tf.reshape(each, [-1]) for each in tensors], 0), split


def shaped(part: tf.Tensor, like: Any) -> tf.Tensor:
    """Returns a tensor with another's shape, as far as it is known statically."""
    part = tf.reshape(part, tf.shape(like))
    part.set_shape(like.shape)
    return part
