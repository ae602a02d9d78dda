"""The three ways to the real data, and what goes wrong on each."""

import hashlib
import os
import pathlib
import sys
import tarfile

import numpy as np
import pytest

from toolkit.data import data_sets as cifar10
from toolkit.data import load
from toolkit.errors import DataError

SHARED = pathlib.Path(__file__).parents[3] / "shared/data/prepare_cifar10.py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def archive(tmp_path):
    """An archive of CIFAR-10's binary layout with ten pictures a file."""
    folder = tmp_path / "source" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        records = random.integers(0, 256, (10, 3073), np.uint8)
        records[:, 0] = np.arange(10)
        records.tofile(folder / name)
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n")
    path = tmp_path / cifar10.ARCHIVE
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, "cifar-10-batches-bin")
    return path


@pytest.fixture
def recorded(monkeypatch, archive):
    """TFDS is told that this archive is the one it knows."""
    import tensorflow_datasets as tfds

    known = tfds.builder("cifar10", data_dir=str(archive.parent / "unused"))
    (url, info), *_ = known.url_infos.items()
    mine = type(info)(
        size=archive.stat().st_size, checksum=hashlib.sha256(archive.read_bytes()).hexdigest(), filename=cifar10.ARCHIVE
    )
    monkeypatch.setattr(type(known), "url_infos", {url: mine})
    return archive


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TFDS's own, while it writes.
def test_a_hand_placed_archive_is_prepared_and_then_read_as_prepared(recorded, tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    recorded.rename(folder / cifar10.ARCHIVE)
    examples = load("cifar10", data_dir=folder)
    assert examples.train_images.shape == (50, 32, 32, 3)
    assert examples.test_images.dtype == np.uint8
    assert examples.classes == CLASSES
    assert sorted(examples.test_labels) == list(range(10))

    (folder / cifar10.ARCHIVE).unlink()
    again = load("auto", data_dir=folder)
    assert again.name == "cifar10"
    assert np.array_equal(examples.train_images, again.train_images)
    assert examples.fingerprint() == again.fingerprint()

    shard = next((folder / "cifar10").rglob("*train*tfrecord*"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(DataError, match="can't be read.*Remove"):
        load("cifar10", data_dir=folder)


def test_a_truncated_archive(tmp_path):
    (tmp_path / cifar10.ARCHIVE).write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(DataError, match="1,002 bytes instead of 170,052,171"):
        load("cifar10", data_dir=tmp_path)


def test_an_archive_with_another_checksum(tmp_path):
    with (tmp_path / cifar10.ARCHIVE).open("wb") as file:
        file.truncate(170_052_171)  # A hole: takes no room on the disk.
    with pytest.raises(DataError, match="its SHA-256 is [0-9a-f]{64}, not c4a38c50"):
        load("cifar10", data_dir=tmp_path)


def test_neither_data_nor_network_names_the_three_ways(tmp_path):
    with pytest.raises(DataError, match=r"TFDS elsewhere.*cifar-10-binary\.tar\.gz.*data=shapes"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "auto"])
def test_a_directory_that_is_missing_or_a_file(tmp_path, name):
    with pytest.raises(DataError, match="no such directory"):
        load(name, data_dir=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="that is a file"):
        load(name, data_dir=tmp_path / "file")


def test_a_directory_that_may_not_be_read(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    if os.geteuid() != 0:
        with pytest.raises(DataError, match="may not be read"):
            load("cifar10", data_dir=closed)
        return
    for parent in (tmp_path, *tmp_path.parents[:2]):  # pytest's own folders are for the owner alone.
        parent.chmod(0o755)
    os.seteuid(65534)  # Root may read anything: be nobody for a moment.
    try:
        with pytest.raises(DataError, match="may not be read"):
            load("cifar10", data_dir=closed)
    finally:
        os.seteuid(0)


@pytest.mark.slow
def test_auto_says_that_it_takes_the_embedded_data(tmp_path, caplog):
    with caplog.at_level("INFO", "toolkit"):
        assert load("auto", data_dir=tmp_path).name == "shapes"
    assert "No prepared CIFAR-10" in caplog.text


@pytest.mark.slow
def test_auto_reads_no_cifar10_where_nothing_can(tmp_path, monkeypatch, caplog):
    (tmp_path / "cifar10/3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10/3.0.2/dataset_info.json").touch()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with caplog.at_level("INFO", "toolkit"):
        assert load("auto").name == "shapes"
    assert "TensorFlow Datasets isn't installed" in caplog.text


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match="auto, cifar10, shapes"):
        load("imagenet")


@pytest.mark.long
@pytest.mark.slow
def test_real_pictures(tmp_path):
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not on this machine")
    pytest.importorskip("PIL", reason="the preparation script needs Pillow")
    import subprocess
    import sys

    subprocess.run(
        [sys.executable, str(SHARED), "--data_dir", str(tmp_path)], check=True, capture_output=True, timeout=200
    )
    examples = load("cifar10", data_dir=tmp_path)
    assert examples.train_images.shape == (50_000, 32, 32, 3)
    assert np.bincount(examples.test_labels).tolist() == [1000] * 10
    assert 115 < examples.train_images.mean() < 126
