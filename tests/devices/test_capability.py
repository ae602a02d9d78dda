"""What TensorFlow's builds can do on made-up cards, and which cards its devices are on. Needs no GPU."""

import sys

import pytest
import recorded
import tensorflow as tf
from packaging.version import Version

from toolkit.devices import take
from toolkit.devices.capability import build_info, support
from toolkit.devices.setup import cards_of

LISTED = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]  # By TensorFlow's wheels of 2.20 and 2.21.
WHEEL = {"version": "2.21.0", "cuda_version": "12.5.1", "cuda_compute_capabilities": LISTED}
OLDER = {**WHEEL, "version": "2.20.0"}
BLACKWELL = {**WHEEL, "cuda_version": "12.8.1", "cuda_compute_capabilities": ["sm_80", "compute_120"]}
WITHOUT_PTX = {**WHEEL, "cuda_compute_capabilities": ["sm_80", "sm_90a"]}
FOR_CPUS = {"version": "2.21.0", "is_cuda_build": False}


@pytest.mark.parametrize(
    ("capability", "build", "kernels", "xla"),
    [
        ((5, 0), WHEEL, "left out", False),
        ((6, 1), WHEEL, "binary", True),
        ((7, 5), WHEEL, "binary", True),
        ((8, 0), WHEEL, "binary", True),
        ((9, 0), WHEEL, "binary", True),  # compute_90 has both.
        ((9, 0), {**WHEEL, "cuda_compute_capabilities": ["compute_80"]}, "ptx", True),
        ((10, 0), WHEEL, "ptx", False),
        ((12, 0), WHEEL, "ptx", False),
        ((12, 0), {**WHEEL, "cuda_version": "12.9.1"}, "ptx", True),
        ((12, 0), {**WHEEL, "cuda_version": None}, "ptx", False),
        ((13, 0), WHEEL, "ptx", False),  # Not on sale yet.
        ((9, 0), OLDER, "binary", True),
        ((12, 0), OLDER, "none", False),
        ((12, 0), {**OLDER, "cuda_compute_capabilities": ["compute_80"]}, "ptx", False),
        ((12, 0), {**OLDER, "version": ""}, "ptx", False),  # A nightly build.
        ((12, 0), BLACKWELL, "binary", True),
        ((12, 1), BLACKWELL, "binary", False),  # The PTX of CUDA 12.8 has no sm_121.
        ((13, 0), BLACKWELL, "ptx", False),
        ((10, 0), BLACKWELL, "none", False),
        ((8, 6), WITHOUT_PTX, "binary", True),
        ((9, 0), WITHOUT_PTX, "binary", True),
        ((9, 1), WITHOUT_PTX, "none", False),
        ((12, 0), WITHOUT_PTX, "none", False),
        ((10, 3), {**BLACKWELL, "cuda_version": "12.9.1", "cuda_compute_capabilities": ["sm_100f"]}, "binary", True),
        (None, WHEEL, "unknown", True),
        ((12, 0), FOR_CPUS, "unknown", True),
        ((12, 0), {}, "unknown", True),
        ((12, 0), {**WHEEL, "cuda_compute_capabilities": ["native"]}, "unknown", True),
    ],
)
def test_what_a_build_can_do_on_a_card(capability, build, kernels, xla):
    found = support(capability, build)
    assert (found.kernels, found.xla) == (kernels, xla)
    fine = xla and kernels in ("binary", "unknown")
    assert (found.found == "", found.remedy == "") == (fine, fine)


@pytest.mark.parametrize(
    ("capability", "build", "found", "remedy"),
    [
        ((5, 0), WHEEL, "TensorFlow 2.21.0 leaves it out: it is built for compute capability 6.0", "from its source"),
        ((12, 0), OLDER, "most operations of TensorFlow 2.20.0", "pip install 'tensorflow[and-cuda]>=2.21'"),
        ((12, 0), WITHOUT_PTX, "the operations of TensorFlow 2.21.0", "built for compute capability 12.0"),
        ((12, 0), WHEEL, "XLA of TensorFlow 2.21.0, built with CUDA 12.5, can't", "built with CUDA 12.8 or later"),
        ((13, 0), WHEEL, 'jit_compile="auto" doesn\'t use XLA', "built for compute capability 13.0"),
        ((9, 0), {**WHEEL, "cuda_compute_capabilities": ["compute_80"]}, "the driver compiles", "CUDA_CACHE_MAXSIZE"),
    ],
)
def test_a_card_that_is_not_supported_gets_a_reason_and_a_way_out(capability, build, found, remedy):
    said = support(capability, build)
    assert found in said.found
    assert remedy in said.remedy


def test_the_build_is_what_tensorflow_says_of_itself():
    build = build_info()
    assert Version(build.pop("version")) == Version(tf.__version__)
    assert build == tf.sysconfig.get_build_info()


@pytest.fixture
def machine(monkeypatch):
    """Has these cards, which TensorFlow sees in the same order, some of them in two logical devices."""

    def has(*cards, visible=None, split=1, seen=None):
        monkeypatch.setitem(sys.modules, "pynvml", recorded.nvml(*cards))
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        count = len(cards) if seen is None else seen
        physical = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(count)]
        chosen = physical if visible is None else [physical[n] for n in visible]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: physical)
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda *_: chosen)
        monkeypatch.setattr(
            tf.config, "get_logical_device_configuration", lambda _: [None] * split if split > 1 else None
        )

    return has


def indices(*names):
    return [card.index for card in cards_of(names)]


def test_nvml_says_which_capability_a_card_has(machine):
    machine(recorded.RTX_5090, recorded.LAPTOP)
    assert [card.capability for card in take().gpus] == [(12, 0), None]
    assert take().gpus[0].with_capability() == "GPU 0 (NVIDIA GeForce RTX 5090, compute capability 12.0)"


def test_a_logical_device_is_on_a_card(machine):
    machine(recorded.A100, recorded.H200, recorded.RTX_5090)
    assert indices("CPU:0") == []
    assert indices("/job:localhost/replica:0/task:0/device:GPU:1", "GPU:0") == [1, 0]
    machine(recorded.A100, recorded.H200, recorded.RTX_5090, visible=[2, 1])
    assert indices("GPU:0") == [2]
    machine(recorded.A100, recorded.H200, recorded.RTX_5090, split=2)
    assert indices("GPU:2", "GPU:3") == [1]


def test_all_cards_are_meant_where_nobody_can_tell_which(machine, monkeypatch):
    machine(recorded.LAPTOP, recorded.A100, seen=1)  # TensorFlow leaves out one of the two.
    assert indices("GPU:0") == [0, 1]
    machine(recorded.A100, recorded.MIG)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111,0")
    assert indices("GPU:0") == [0, 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert indices("GPU:0") == [0, 1]
