"""The embedded data set: any number of pictures of ten shapes, generated from a seed.

A shape has a random place, size, turn and colour on a shaded, noisy ground of random colour, so that
no pixel by itself tells anything (a linear classifier stays far below 60 %), while small
convolutions tell the shapes apart within a minute (tests/data/test_shapes.py).
"""

from collections.abc import Callable

import numpy as np

from toolkit.data.examples import Examples

__all__ = ["CLASSES", "generate", "load"]

_SIDE = 32
_CHUNK = 1000  # Pictures drawn at once, which bounds memory at about 60 MB.
_CACHED = 25  # Pictures assembled at once: half a megabyte, which fits into a core's cache.


def _angle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.arctan2(v, u)


# Each is true inside the shape; u and v cover the unit disc and turn with the shape.
_INSIDE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda u, v: u * u + v * v < 0.72,
    "ring": lambda u, v: (u * u + v * v < 0.9) & (u * u + v * v > 0.34),
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) < 0.68,
    "frame": lambda u, v: np.abs(np.maximum(np.abs(u), np.abs(v)) - 0.58) < 0.16,
    "triangle": lambda u, v: np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) < 0.45,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) < 0.22) & (np.maximum(np.abs(u), np.abs(v)) < 0.9),
    "bar": lambda u, v: (np.abs(u) < 0.95) & (np.abs(v) < 0.26),
    "crescent": lambda u, v: (u * u + v * v < 0.85) & ((u - 0.45) ** 2 + v * v > 0.5),
    "star": lambda u, v: u * u + v * v < (0.62 + 0.36 * np.cos(5 * _angle(u, v))) ** 2,
    "bow": lambda u, v: (np.abs(v) < np.abs(u) * 0.8) & (np.abs(u) < 0.85),
}
CLASSES = tuple(_INSIDE)


def generate(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` pictures; equal seeds and counts give equal bytes.

    Returns:
        Pictures, uint8 [count, 32, 32, 3], and labels, int32 [count], all classes equally often
        (to within one).
    """
    random = np.random.Generator(np.random.PCG64(seed))
    labels = random.permutation(np.arange(count, dtype=np.int32) % len(CLASSES))
    images = np.empty((count, _SIDE, _SIDE, 3), np.uint8)
    for start in range(0, count, _CHUNK):
        images[start : start + _CHUNK] = _draw(labels[start : start + _CHUNK], random)
    return images, labels


def _draw(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return random.uniform(low, high, (n, *shape, *(1,) * (3 - len(shape)))).astype(np.float32)

    radius = uniform(6, 13)[..., 0]
    turn = uniform(0, 2 * np.pi)[..., 0]
    reach = _SIDE / 2 - radius * 0.9
    pixels = np.arange(_SIDE, dtype=np.float32) + 0.5 - _SIDE / 2
    x = (pixels[None, None, :] - uniform(-1, 1)[..., 0] * reach) / radius
    y = (pixels[None, :, None] - uniform(-1, 1)[..., 0] * reach) / radius
    u = np.cos(turn) * x + np.sin(turn) * y
    v = np.cos(turn) * y - np.sin(turn) * x
    inside = np.empty((n, _SIDE, _SIDE), bool)
    for number, name in enumerate(CLASSES):
        mine = labels == number
        inside[mine] = _INSIDE[name](u[mine], v[mine])
    # Colours are the first axis until the end: NumPy is slow over an innermost axis of length 3.
    ground = random.uniform(40, 215, (n, 3, 1, 1)).astype(np.float32)
    # The shape's colour differs clearly from the background's, in either direction.
    away = random.uniform(45, 120, (n, 3, 1, 1)).astype(np.float32) * np.where(ground > 127, -1, 1)
    shading = (
        uniform(-30, 30) * (pixels / _SIDE)[None, None, None, :]
        + uniform(-30, 30) * (pixels / _SIDE)[None, None, :, None]
    )
    noise = random.standard_normal((n, _SIDE, _SIDE, 3), np.float32)
    noise *= 12
    pictures = np.empty(noise.shape, np.uint8)
    for start in range(0, n, _CACHED):
        few = slice(start, start + _CACHED)
        plain = ground[few] + shading[few] + np.where(inside[few, None], away[few], 0)
        picture = plain.transpose(0, 2, 3, 1) + noise[few]
        pictures[few] = np.clip(picture, 0, 255, out=picture).astype(np.uint8)
    return pictures


def load(*, seed: int = 0, train: int = 20_000, test: int = 4_000) -> Examples:
    """Generates a training and a test set without common pictures.

    Args:
        seed: Seed of the pictures.
        train: Number of training pictures.
        test: Number of test pictures.
    """
    train_images, train_labels = generate(train, 2 * seed)
    test_images, test_labels = generate(test, 2 * seed + 1)
    return Examples(
        name="shapes",
        origin=f"generated on the fly from seed {seed}",
        classes=CLASSES,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )
