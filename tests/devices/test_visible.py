import os
import sys

import pytest
import recorded

from toolkit.devices import Gpu, Inventory, environment, inventory, resolve, take
from toolkit.errors import DeviceError

CARDS = Inventory(
    gpus=(
        Gpu(index=0, name="A100", uuid="GPU-8932f937", memory_mib=40960),
        Gpu(index=1, name="A100", uuid="GPU-89aa0000", memory_mib=40960, mig_uuids=("MIG-11", "MIG-12")),
        Gpu(index=2, name="T4", uuid="GPU-aaaa1111", memory_mib=15360),
        Gpu(index=3, name="T4", uuid="GPU-bbbb2222", memory_mib=15360),
    )
)
BARE = Inventory(without_gpus="NVML: Driver Not Loaded")


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("0,1", ("0", "1")),
        ('"0,2,3"', ("0", "2", "3")),
        ("'1'", ("1",)),
        (" 3 , 0 ", ("3", "0")),
        ("", ()),
        ('""', ()),
        ("-1", ()),
        ("2,-1,0", ("2",)),
        ("GPU-aaaa1111", ("2",)),
        ("GPU-893", ("0",)),
        ("MIG-12,3", ("MIG-12", "3")),
    ],
)
def test_whatever_cuda_accepts(value, ids):
    assert resolve(value, CARDS) == ids


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("4", "4 GPUs"),
        ("0,0", "twice"),
        ("0,GPU-8932f937", "twice"),
        ("GPU-89", "letters"),
        ("GPU-zz", "4 GPUs"),
        ("two", "neither"),
        ("0;1", "neither"),
        ("0,,1", "neither"),
        ("١", "neither"),
    ],
)
def test_what_names_no_card_is_refused(value, word):
    with pytest.raises(DeviceError, match=word):
        resolve(value, CARDS)


def test_a_machine_without_gpus_says_why():
    with pytest.raises(DeviceError, match="Driver Not Loaded.*CPU"):
        resolve("0", BARE)


def test_a_child_is_started_with_nvidia_smis_order():
    assert environment("3,GPU-893", CARDS) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,0"}
    assert environment("", CARDS)["CUDA_VISIBLE_DEVICES"] == "-1"


def test_numbers_are_unknown_where_cuda_orders_by_speed():
    assert inventory.shown({}, CARDS) is None
    assert inventory.shown({"CUDA_VISIBLE_DEVICES": "1"}, CARDS) is None
    assert inventory.shown({"CUDA_VISIBLE_DEVICES": "GPU-bbbb2222"}, CARDS) == ("3",)
    assert inventory.shown({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, CARDS) == ("0", "1", "2", "3")
    assert inventory.shown({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}, CARDS) == ("2", "0")


@pytest.fixture
def started(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("toolkit.devices.inventory.take", lambda: CARDS)
    return calls


def test_restart_hands_the_variables_to_the_same_command(started, capsys):
    before = dict(os.environ)
    inventory.restart("2,3")
    (program, command, env) = started[0]
    assert program == sys.executable
    assert command == [sys.executable, *sys.orig_argv[1:]]
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert dict(os.environ) == before
    assert "CUDA_VISIBLE_DEVICES=2,3" in capsys.readouterr().err


def test_restart_happens_once(started, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    inventory.restart("2,3")
    inventory.restart()
    assert not started


def test_restart_leaves_a_machine_without_gpus_alone(started, monkeypatch):
    monkeypatch.setattr("toolkit.devices.inventory.take", lambda: BARE)
    inventory.restart()
    inventory.restart("-1")
    assert not started


USED = {**recorded.A100, "compute": [(2**22 + 7, 30 << 30)]}
UNSEEN = {**recorded.A100, "compute": []}
DESKTOP = {**recorded.FREE, "memory": (40960 << 20, 6000 << 20), "graphics": [(2**22 + 8, 6 << 30)]}


@pytest.fixture
def machine(monkeypatch):
    def has(*cards):
        monkeypatch.setitem(sys.modules, "pynvml", recorded.nvml(*cards))
        return take()

    return has


def test_free_cards_are_those_that_nobody_computes_on(machine):
    cards = machine(USED, recorded.FREE, UNSEEN, DESKTOP)
    assert inventory.unused({}, cards) == ("1", "3")
    assert environment("free", cards)["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_free_cards_are_taken_from_those_that_are_visible(machine):
    cards = machine(recorded.FREE, recorded.FREE, USED)
    assert inventory.unused({"CUDA_VISIBLE_DEVICES": "2,1"}, cards) == ("1",)


def test_where_none_is_free_the_users_are_named(machine):
    cards = machine(USED, UNSEEN)
    with pytest.raises(DeviceError) as refused:
        inventory.unused({}, cards)
    assert f"GPU 0 by process {2**22 + 7}; GPU 1 by processes that aren't visible here (31,000 MiB)" in str(
        refused.value
    )


def test_free_is_nothing_on_a_machine_without_gpus(machine):
    assert inventory.unused({}, machine()) == ()


def test_restart_takes_the_free_cards_once(started, machine, monkeypatch):
    cards = machine(USED, recorded.FREE, recorded.FREE)
    monkeypatch.setattr("toolkit.devices.inventory.take", lambda: cards)
    inventory.restart("free")
    ((_, _, handed),) = started
    assert (handed["CUDA_DEVICE_ORDER"], handed["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "1,2")
    started.clear()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    inventory.restart("free")
    assert started == []
