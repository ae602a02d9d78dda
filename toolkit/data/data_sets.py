"""The data sets, by name: CIFAR-10 through TFDS, and shapes, which is embedded.

CIFAR-10 comes from a prepared directory, an archive, or a download. Krizhevsky, "Learning Multiple Layers of Features
from Tiny Images", 2009: 50,000 training and 10,000 test pictures, 32x32, ten classes.

Shapes has any number of pictures of ten shapes, generated from a seed. A shape has a random place, size, turn and
colour on a shaded, noisy ground of random colour, so that no pixel by itself tells anything (a linear classifier stays
far below 60 %), while small convolutions tell the shapes apart within a minute (tests/data/test_shapes.py).
"""

import importlib.util
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.data.pipeline import Examples
from toolkit.errors import DataError
from toolkit.support.files import sha256

NAMES = ("auto", "cifar10", "shapes")
_LOG = logging.getLogger(__name__)


def load(name: str = "auto", *, data_dir: str | os.PathLike | None = None, seed: int = 0) -> Examples:
    """Loads a data set into memory.

    Args:
        name: "cifar10", "shapes" (generated, nothing to download), or "auto": a CIFAR-10 that TFDS
            has prepared under `data_dir`, if TFDS is installed, and otherwise shapes; which of the two is logged.
        data_dir: TFDS's directory; None for its default.
        seed: Seed of the generated pictures; CIFAR-10 is what it is.

    Raises:
        DataError: The name is unknown, or CIFAR-10 was asked for and can't be had.
    """
    DataError.check_choice(name, NAMES, asked=f"data={name!r}", found="there is no data set of that name")
    if name == "auto":
        directory = data_dir if data_dir is not None else cifar10_directory()
        if data_dir is not None and not os.path.isdir(os.path.expanduser(data_dir)):
            return load_cifar10(data_dir)  # Named, but not a directory: the function below says what is wrong.
        name = "shapes"
        if not cifar10_is_prepared(directory):
            _LOG.info("No prepared CIFAR-10 in %s: training on the embedded data set, shapes", directory)
        elif data_dir is None and importlib.util.find_spec("tensorflow_datasets") is None:
            _LOG.info("TensorFlow Datasets isn't installed, so CIFAR-10 can't be read: training on shapes")
        else:
            name = "cifar10"
    return load_cifar10(data_dir) if name == "cifar10" else load_shapes(seed=seed)


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


def load_shapes(*, seed: int = 0, train: int = 20_000, test: int = 4_000) -> Examples:
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


ARCHIVE = "cifar-10-binary.tar.gz"
_ANSWER_SECONDS = 15  # Seconds in which the archive's server must answer.


def cifar10_directory() -> pathlib.Path:
    """Returns TFDS's directory for data sets."""
    return pathlib.Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def cifar10_is_prepared(data_dir: str | os.PathLike) -> bool:
    """Returns whether TFDS has prepared CIFAR-10 in this directory. Imports nothing."""
    try:
        return any(pathlib.Path(data_dir).expanduser().glob("cifar10/*/dataset_info.json"))
    except OSError:
        return False


def load_cifar10(data_dir: str | os.PathLike | None = None) -> Examples:
    """Reads CIFAR-10 into memory (180 MB), and prepares it first if needed.

    Looks for, in this order: a data set that TFDS has prepared under `data_dir`; the archive
    `cifar-10-binary.tar.gz` in `data_dir`, checked against the SHA-256 that TFDS records; the network.

    Args:
        data_dir: TFDS's directory; None for its default. One given by name must exist.

    Raises:
        DataError: The directory is missing or not readable, the archive or the prepared files are
            damaged, or there is neither data nor network.
    """
    directory = _checked_directory(data_dir)
    tfds = _tfds()
    builder = tfds.builder("cifar10", data_dir=str(directory))
    if not cifar10_is_prepared(directory):
        _prepare(tfds, builder, directory)
    try:
        parts = {split: _read(tfds, builder, split) for split in ("train", "test")}
    except Exception as error:  # TFDS and TensorFlow raise a dozen types for a missing or damaged file.
        raise DataError(
            asked=f"CIFAR-10 was prepared in {builder.data_path}",
            found=f"it can't be read ({_first_line(error)})",
            remedy=f"Remove {builder.data_path} and prepare it again",
        ) from error
    _check_sizes(builder, parts)
    return Examples(
        name="cifar10",
        origin=f"prepared by TFDS in {builder.data_path}",
        classes=tuple(builder.info.features["label"].names),
        train_images=parts["train"][0],
        train_labels=parts["train"][1],
        test_images=parts["test"][0],
        test_labels=parts["test"][1],
    )


def _checked_directory(data_dir: str | os.PathLike | None) -> pathlib.Path:
    if data_dir is None:
        return cifar10_directory()
    directory = pathlib.Path(data_dir).expanduser()
    asked = f"data_dir={str(data_dir)!r} is where CIFAR-10 is or goes"
    try:
        os.scandir(directory).close()
    except FileNotFoundError:
        raise DataError(
            asked=asked, found="there is no such directory", remedy="Create it, or correct the name"
        ) from None
    except NotADirectoryError:
        raise DataError(asked=asked, found="that is a file", remedy="Name the directory that holds it") from None
    except PermissionError:
        raise DataError(
            asked=asked, found="it may not be read by this user", remedy="Give read permission, or name another"
        ) from None
    return directory


def _tfds() -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DataError(
            asked="CIFAR-10",
            found=f"tensorflow-datasets, which reads it, can't be imported ({error})",
            remedy="Install it with `pip install 'tf-strategy-toolkit[datasets]'`, or use data=shapes",
        ) from error
    return tfds


def _prepare(tfds, builder, directory: pathlib.Path) -> None:
    recorded = next(iter(builder.url_infos.values()))
    archive = next((d / ARCHIVE for d in (directory, directory / "downloads/manual") if (d / ARCHIVE).exists()), None)
    if archive is not None:
        _check_archive(archive, recorded)
        _LOG.info("Preparing CIFAR-10 from %s", archive)
    else:
        _check_network(next(iter(builder.url_infos)), directory)
        _LOG.info("Downloading CIFAR-10 (%.0f MB) into %s", recorded.size / 1e6, directory)
    config = tfds.download.DownloadConfig(manual_dir=str(archive.parent)) if archive else None
    try:
        builder.download_and_prepare(download_config=config)
    except Exception as error:  # A full disk, no permission, a lost connection: one of a dozen types.
        raise DataError(
            asked=f"CIFAR-10 was to be prepared in {directory}",
            found=f"TFDS could not do it ({_first_line(error)})",
            remedy=f"Check that {directory} is writable and has 500 MB free, then try again",
        ) from error


def _check_archive(archive: pathlib.Path, recorded) -> None:
    asked = f"{archive} is to be the CIFAR-10 archive"
    remedy = "Fetch it again; it is the 'binary version' on the CIFAR-10 home page"
    try:
        size = archive.stat().st_size
        if size != recorded.size:
            raise DataError(asked=asked, found=f"it has {size:,} bytes instead of {recorded.size:,}", remedy=remedy)
        digest = sha256(archive)
    except OSError as error:
        raise DataError(asked=asked, found=f"it can't be read ({error.strerror})", remedy=remedy) from error
    if digest != recorded.checksum:
        raise DataError(
            asked=asked, found=f"its SHA-256 is {digest}, not {recorded.checksum} as TFDS records", remedy=remedy
        )


def _check_network(url: str, directory: pathlib.Path) -> None:
    """Asks the server for the archive's header, because TFDS itself would wait and retry without a limit."""
    import requests

    try:
        requests.head(url, timeout=_ANSWER_SECONDS, allow_redirects=True).raise_for_status()
    except requests.RequestException as error:
        raise DataError(
            asked="data=cifar10 asks for the real pictures",
            found=f"{directory} holds neither a prepared data set nor {ARCHIVE}, and it can't be downloaded "
            f"({type(error).__name__})",
            remedy=f"Prepare it with TFDS elsewhere and name it with data_dir, or put {ARCHIVE} into {directory}, "
            "or use data=shapes, which needs neither",
        ) from error


def _read(tfds, builder, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint8 [N, 32, 32, 3] and int32 [N], in TFDS's own order."""
    import tensorflow as tf

    # TFDS decodes pictures one after another; decoding them in parallel is three times as fast.
    raw = builder.as_dataset(
        split=split,
        decoders={"image": tfds.decode.SkipDecoding()},
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )

    def decode(one: dict) -> tuple:
        picture = tf.io.decode_image(one["image"], channels=3, expand_animations=False)
        return tf.ensure_shape(picture, (32, 32, 3)), one["label"]

    batches = raw.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(1000)
    images, labels = zip(*batches.as_numpy_iterator(), strict=True)
    return np.concatenate(images), np.concatenate(labels).astype(np.int32)


def _check_sizes(builder, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for split, (images, _) in parts.items():
        expected = builder.info.splits[split].num_examples
        if len(images) != expected:
            raise DataError(
                asked=f"CIFAR-10's {split} split has {expected} pictures",
                found=f"{len(images)} were read from {builder.data_path}",
                remedy=f"Remove {builder.data_path} and prepare it again",
            )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
