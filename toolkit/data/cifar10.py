"""CIFAR-10 through TFDS: from a prepared directory, an archive, or a download.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009: 50,000 training and
10,000 test pictures, 32x32, ten classes.
"""

import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any

from toolkit.data.examples import Examples
from toolkit.errors import DataError
from toolkit.support.files import sha256

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ARCHIVE", "default_directory", "is_prepared", "load"]

ARCHIVE = "cifar-10-binary.tar.gz"
_LOG = logging.getLogger(__name__)
_ANSWER_SECONDS = 15  # Seconds in which the archive's server must answer.


def default_directory() -> pathlib.Path:
    """Returns TFDS's directory for data sets."""
    return pathlib.Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def is_prepared(data_dir: str | os.PathLike) -> bool:
    """Returns whether TFDS has prepared CIFAR-10 in this directory. Imports nothing."""
    try:
        return any(pathlib.Path(data_dir).expanduser().glob("cifar10/*/dataset_info.json"))
    except OSError:
        return False


def load(data_dir: str | os.PathLike | None = None) -> Examples:
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
    if not is_prepared(directory):
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
        return default_directory()
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


def _read(tfds, builder, split: str) -> tuple["np.ndarray", "np.ndarray"]:
    """Returns uint8 [N, 32, 32, 3] and int32 [N], in TFDS's own order."""
    import numpy as np
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


def _check_sizes(builder, parts: dict[str, tuple["np.ndarray", "np.ndarray"]]) -> None:
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
