"""Faults planted one at a time, each found, named and given its cure; and nothing found where nothing is wrong."""

import json
import os
import resource
import shutil
import socket
import sys
from importlib import metadata

import pytest
import recorded

from toolkit import cluster, devices
from toolkit.observe.doctor import Situation, examine, machine

GIB = 1 << 30


class Plant:
    """A healthy machine, and ways to spoil it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        (folder / "home").mkdir()
        (folder / "work").mkdir()
        self.environ = {"HOME": str(folder / "home")}
        self.given = {
            "cluster": None,
            "pci": folder / "no pci",
            "cpuinfo": self.file("cpuinfo", "flags\t\t: fpu avx\n"),
        }
        monkeypatch.setitem(sys.modules, "pynvml", recorded.nvml())
        self.disk(free=100 * GIB)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))

    def file(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def disk(self, *, free, total=200 * GIB):
        self.patch.setattr(machine.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(total, total - free, free))

    def cards(self, *cards, **settings):
        self.patch.setitem(sys.modules, "pynvml", recorded.nvml(*cards, **settings))
        self.patch.setattr(machine, "_loads", lambda _: True)
        self.patch.setattr(machine, "_SEEN", f"print({json.dumps(['GPU'] * len(cards))!r})")
        self.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"

    def built_for(self, *capabilities, version="2.21.0"):
        build = {"cuda_compute_capabilities": list(capabilities), "version": version, "cuda_version": "12.5.1"}
        self.patch.setattr(machine, "build_info", lambda: {**build, "is_cuda_build": True})

    def installed(self, name, version, requires=()):
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        self.file(f"site/{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        self.patch.syspath_prepend(self.folder / "site")

    def workers(self, *addresses):
        self.given["cluster"] = cluster.Cluster({"worker": list(addresses)})

    def findings(self):
        situation = Situation(
            environ=self.environ,
            inventory=devices.take(),
            here=self.folder / "work",
            temporary=self.folder,
            shared_memory=self.folder,
            **self.given,
        )
        return list(examine(situation))

    def wrong(self):
        return [finding for finding in self.findings() if finding.level != "ok"]


@pytest.fixture
def plant(tmp_path, monkeypatch):
    return Plant(tmp_path, monkeypatch)


@pytest.fixture
def taken():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_healthy_machine_has_nothing_wrong(plant):
    assert plant.wrong() == []
    assert {finding.check for finding in plant.findings()} == {"versions", "environment", "GPU", "machine", "data"}


def test_data_sets_that_only_cifar10_needs_may_be_missing(plant):
    found = metadata.Distribution.from_name

    def without(name):
        if name == "tensorflow-datasets":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    plant.patch.setattr(metadata.Distribution, "from_name", without)
    assert plant.wrong() == []
    assert "tensorflow-datasets" not in str(plant.findings())


@pytest.mark.slow
def test_a_healthy_machine_with_cards_has_nothing_wrong(plant):
    plant.cards(recorded.A100, recorded.FREE)
    assert plant.wrong() == []
    assert "TensorFlow sees 2 of 2" in str(plant.findings())


def test_a_healthy_cluster_has_nothing_wrong(plant):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plant.workers(f"127.0.0.1:{port}")
    assert plant.wrong() == []


def variable(name, value):
    return lambda plant: plant.environ.update({name: value})


def keras_json(plant):
    plant.file("home/.keras/keras.json", '{"backend": "torch", "floatx": "float32"}')


def missing_library(plant):
    plant.cards(recorded.A100)
    plant.patch.setattr(machine, "_loads", lambda name: not name.startswith("libcudnn"))


def unseen(plant):
    plant.cards(recorded.A100, recorded.FREE)
    plant.patch.setattr(machine, "_SEEN", "print('[]')")


def no_driver(plant):
    plant.file("pci/0000:07:00.0/vendor", "0x10de\n")
    plant.file("pci/0000:07:00.0/class", "0x030200\n")
    plant.given["pci"] = plant.folder / "pci"


def too_new(plant):
    plant.cards(recorded.RTX_5090)
    plant.built_for("sm_80", "compute_90")


def hidden(plant):
    plant.cards(recorded.A100, recorded.FREE)
    plant.environ["CUDA_VISIBLE_DEVICES"] = "1"


def slurm(plant):
    plant.environ.update(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2")


def unwritable(plant):
    plant.patch.setattr(machine.os, "access", lambda *_: False)  # Root may write everywhere.


FAULTS = {
    "another backend": (variable("KERAS_BACKEND", "jax"), "KERAS_BACKEND", "unset KERAS_BACKEND"),
    "another backend in a file": (keras_json, "keras.json", "export KERAS_BACKEND=tensorflow"),
    "Keras 2": (variable("TF_USE_LEGACY_KERAS", "1"), "TF_USE_LEGACY_KERAS", "unset TF_USE_LEGACY_KERAS"),
    "a broken TF_CONFIG": (variable("TF_CONFIG", '{"cluster": {'), "TF_CONFIG", ""),
    "a TF_CONFIG without a task": (
        variable("TF_CONFIG", '{"cluster": {"worker": ["localhost:7"]}}'),
        "TF_CONFIG",
        'Write "task"',
    ),
    "a launcher's broken variables": (slurm, "cluster", "or set TF_CONFIG"),
    "growth from outside": (variable("TF_FORCE_GPU_ALLOW_GROWTH", "true"), "TF_FORCE_GPU_ALLOW_GROWTH", "unset TF_"),
    "no thread": (variable("OMP_NUM_THREADS", "many"), "OMP_NUM_THREADS", "unset OMP_NUM_THREADS"),
    "an unresolvable host": (lambda plant: plant.workers("no-such-host.invalid:7"), "worker:0", "getent hosts no-such"),
    "an old protobuf": (
        lambda plant: plant.installed("protobuf", "3.20.1"),
        "protobuf",
        "pip install 'protobuf<8.0.0,",
    ),
    "a second TensorFlow": (
        lambda plant: plant.installed("tf_nightly", "2.22.0"),
        "tf-nightly",
        "pip uninstall -y tf-",
    ),
    "no space": (lambda plant: plant.disk(free=9 << 20), "disk", "du -xh"),
    "little space": (lambda plant: plant.disk(free=GIB), "disk", "du -xh"),
    "no permission": (unwritable, "disk", "Start in a directory"),
    "Docker's shared memory": (lambda plant: plant.disk(free=64 << 20, total=64 << 20), "shared memory", "--shm-size"),
    "few open files": (
        lambda plant: plant.patch.setattr(resource, "getrlimit", lambda _: (256, 4096)),
        "open files",
        "ulimit -n 4096",
    ),
    "an old processor": (
        lambda plant: plant.given.update(cpuinfo=plant.file("old", "flags\t: fpu sse2\n")),
        "processor",
        "-cpu host",
    ),
    "a clock that is behind": (
        lambda plant: plant.patch.setattr(machine.time, "time", lambda: 0.0),
        "clock",
        "set-ntp",
    ),
    "a keras.json that is none": (lambda plant: plant.file("home/.keras/keras.json", "[]"), "keras.json", "mv "),
    "a strange number of threads": (variable("OMP_NUM_THREADS", "\u00b2"), "OMP_NUM_THREADS", "unset OMP_NUM_THREADS"),
    "a strange host": (lambda plant: plant.workers("a..b:4"), "worker:0", "getent hosts"),
    "a check that fails": (
        lambda plant: plant.patch.setattr(machine.shutil, "disk_usage", lambda _: 1 / 0),
        "machine",
        "toolkit doctor --json",
    ),
    "no data directory": (variable("TFDS_DATA_DIR", "/no/such"), "data", "mkdir -p /no/such"),
    "a missing library": (missing_library, "CUDA libraries", "pip install 'tensorflow[and-cuda]=="),
    "an old driver": (lambda plant: plant.cards(recorded.A100, cuda=11080), "GPU driver", "Install an NVIDIA driver"),
    "no driver": (no_driver, "GPU driver", "nvidia-smi"),
    "cards that TensorFlow doesn't see": (unseen, "GPU", "list_physical_devices"),
    "a card that TensorFlow is too old for": (too_new, "GPU", "built with CUDA 12.8 or later"),
    "a hidden card": (hidden, "CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"),
    "a card that isn't there": (variable("CUDA_VISIBLE_DEVICES", "7"), "CUDA_VISIBLE_DEVICES", "unset CUDA"),
    "keras.distribution": (
        lambda plant: plant.file("work/train.py", "import keras\nkeras.distribution.set_distribution(None)\n"),
        "keras.distribution",
        "toolkit.strategies.create()",
    ),
}


@pytest.mark.parametrize("installed", [False, True])
def test_keras_2_is_a_failure_where_it_is_missing(plant, installed):
    plant.environ["TF_USE_LEGACY_KERAS"] = "1"
    if installed:
        plant.installed("tf_keras", "2.21.0")
    (found,) = plant.wrong()
    assert found.level == ("warning" if installed else "failure")
    assert ("isn't installed" in found.found) is not installed


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_cure_named(plant, fault):
    spoil, check, cure = FAULTS[fault]
    spoil(plant)
    wrong = plant.wrong()
    assert check in {finding.check for finding in wrong}, wrong
    (found, *_) = [finding for finding in wrong if finding.check == check]
    assert cure in found.cure
    assert found.cure
    assert not found.found.endswith(".")


def test_a_port_that_is_taken_names_who_has_it(plant, taken):
    plant.workers(f"127.0.0.1:{taken}")
    (found,) = plant.wrong()
    assert found.check == "worker:0"
    assert "that port can't be had" in found.found
    assert "has it" in found.found
    assert f"ss -ltnp 'sport = :{taken}'" in found.cure


def test_a_clock_that_nothing_keeps_is_said_of_several_hosts(plant):
    plant.patch.setattr(machine, "_clock_is_kept", lambda: False)
    plant.workers("127.0.0.1:1", "127.0.0.2:2")
    assert [finding.cure for finding in plant.wrong() if finding.check == "clock"] == ["timedatectl set-ntp true"]
    plant.workers("127.0.0.1:1", "127.0.0.1:2")
    assert not [finding for finding in plant.wrong() if finding.check == "clock"]


def test_fewer_threads_than_cores_are_said(plant):
    plant.environ["OMP_NUM_THREADS"] = "1"
    cores = devices.cores()
    assert [finding.check for finding in plant.wrong()] == (["OMP_NUM_THREADS"] if cores > 1 else [])


def test_an_empty_variable_chooses_no_backend(plant):
    plant.environ["KERAS_BACKEND"] = ""
    os.mkfifo(plant.folder / "work" / "pipe.py")
    assert plant.wrong() == []


def test_a_comment_about_keras_distribution_is_no_use_of_it(plant):
    plant.file("work/train.py", "# keras.distribution does nothing here\n")
    assert plant.wrong() == []


@pytest.mark.slow
def test_cards_of_a_kind_that_tensorflow_was_not_built_for_have_one_finding(plant):
    plant.cards(recorded.RTX_5090, recorded.A100, {**recorded.RTX_5090, "uuid": "GPU-ff"}, recorded.H200)
    plant.built_for("sm_60", "sm_80", "compute_90")
    (found,) = plant.wrong()
    assert (found.check, found.level) == ("GPU", "warning")
    assert found.found.startswith("GPU 0 (NVIDIA GeForce RTX 5090, compute capability 12.0), GPU 2 (")
    assert "XLA of TensorFlow 2.21.0, built with CUDA 12.5, can't compile for it" in found.found
    assert "jit_compile=False" in found.cure
    assert "TensorFlow sees 4 of 4" in str(plant.findings())
    plant.environ["CUDA_VISIBLE_DEVICES"] = "1,3"
    assert "compute capability" not in str(plant.findings())


@pytest.mark.parametrize(
    ("capability", "version", "cure"),
    [
        ([5, 0], "2.21.0", "build TensorFlow from its source for compute capability 5.0"),
        ([12, 0], "2.20.0", "pip install 'tensorflow[and-cuda]>=2.21'"),
    ],
)
def test_a_card_on_which_tensorflow_does_not_run_is_a_failure(plant, capability, version, cure):
    plant.cards({**recorded.A100, "capability": capability})
    plant.built_for("sm_60", "sm_80", "compute_90", version=version)
    (found,) = plant.wrong()
    assert (found.check, found.level) == ("GPU", "failure")
    assert cure in found.cure


@pytest.mark.slow
def test_a_card_without_a_known_capability_is_nothing_wrong(plant):
    plant.cards(recorded.LAPTOP)
    plant.built_for("sm_60", "sm_80", "compute_90")
    assert plant.wrong() == []
