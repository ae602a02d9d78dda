"""What nvidia-smi shows, as data and as `toolkit devices` prints it, on recorded machines."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import recorded
import rich

from toolkit.cli.main import main
from toolkit.devices.inventory import host, look, tensorflow_names


@pytest.fixture
def machine(monkeypatch):
    def has(*cards):
        monkeypatch.setitem(sys.modules, "pynvml", recorded.nvml(*cards))

    return has


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["devices", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_card_in_use(machine):
    own = os.getpid()
    machine({**recorded.A100, "compute": [(own, 30 << 30), (2**22 + 5, None)]}, recorded.FREE)
    inventory, (used, free) = look()
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert used.pci == "00000000:07:00.0"
    assert (used.memory_used_mib, used.utilisation, used.temperature) == (31000, 97, 61)
    assert (used.watts, used.watts_limit) == (312.4, 400.0)
    mine, stranger = used.processes
    assert (mine.pid, mine.name, mine.memory_mib) == (own, psutil.Process().name(), 30720)
    assert (stranger.name, stranger.memory_mib) == ("", None)
    assert free.processes == ()


def test_what_a_card_does_not_tell_is_none(machine):
    machine(recorded.LAPTOP)
    _, (card,) = look()
    assert card.gpu.name == "Quadro M620"
    assert (card.utilisation, card.temperature, card.watts, card.processes) == (None, None, None, ())


def test_tensorflow_calls_cards_as_the_environment_has_it(machine):
    machine(recorded.A100, recorded.FREE, recorded.MIG)
    inventory, _ = look()
    ordered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert tensorflow_names(ordered, inventory) == {0: "/GPU:0", 1: "/GPU:1", 2: "/GPU:2"}
    assert tensorflow_names({**ordered, "CUDA_VISIBLE_DEVICES": "1,0"}, inventory) == {1: "/GPU:0", 0: "/GPU:1"}
    assert tensorflow_names({**ordered, "CUDA_VISIBLE_DEVICES": "-1"}, inventory) == {}
    assert tensorflow_names({"CUDA_VISIBLE_DEVICES": "MIG-2222"}, inventory) == {2: "/GPU:0"}
    assert tensorflow_names({}, inventory) is None


def test_the_table(machine, capsys, monkeypatch):
    monkeypatch.setattr(rich.get_console(), "width", 100)  # It has read COLUMNS once and for all.
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine(recorded.A100, recorded.FREE, recorded.MIG)
    code, out, err = printed(capsys)
    assert (code, err) == (0, "")
    cards = out[: out.index("UUID")]
    lines = {line.split()[0]: line for line in cards.splitlines() if line.split()}
    assert "/GPU:0" in lines["1"]
    assert "/GPU" not in lines["0"]
    assert "31,000 / 40,960" in lines["0"]
    assert "97 %" in lines["0"]
    assert "312 / 400" in lines["0"]
    assert "MIG-1111" in out
    assert "4242" in out
    assert "GiB used." in out


def test_what_is_wrong_with_the_environment_is_said(machine, capsys, monkeypatch):
    machine(recorded.A100, recorded.FREE)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in printed(capsys)[1]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    code, out, _ = printed(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert "names '7'" in found["remark"]
    assert [gpu["tensorflow"] for gpu in found["gpus"]] == [None, None]
    assert found["gpus"][0]["processes"][1] == {
        "pid": 4242,
        "name": "",
        "memory_mib": 30720,
        "computes": True,
    } or psutil.pid_exists(4242)


@pytest.mark.slow
def test_output_that_cannot_be_written_is_said():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", "devices", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output can't be written: No space left on device\n"


@pytest.mark.slow
def test_watching_without_a_terminal_prints_each_look():
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "devices", "--watch=0.1"], stdout=subprocess.PIPE, text=True
    )
    try:
        seen = [process.stdout.readline() for _ in range(4)]
    finally:
        process.kill()
        process.communicate()
    assert sum("cores" in line for line in seen) >= 1


def test_without_a_gpu_cores_and_memory_are_shown(machine, capsys):
    machine()
    code, out, _ = printed(capsys)
    assert code == 0
    assert out.startswith("No GPU (NVML lists none).")
    assert "cores" in out
    assert host().memory_mib > host().memory_used_mib > 0


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_watch_of_no_time_is_refused(capsys, value):
    code, _, err = printed(capsys, f"--watch={value}")
    assert code == 2
    assert "--watch" in err


def test_a_card_that_cannot_be_read_hides_no_other(machine, capsys):
    machine(recorded.A100, {**recorded.FREE, "memory": None}, recorded.FREE)
    inventory, usage = look()
    assert [gpu.index for gpu in inventory.gpus] == [0, 2]
    assert len(usage) == 2
    assert inventory.unreadable == ("GPU 1 (Not Supported)",)
    assert "NVML can't read GPU 1 (Not Supported)" in inventory.describe()
    assert "NVML can't read GPU 1 (Not Supported)." in printed(capsys)[1]
