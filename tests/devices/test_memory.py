import pytest

from toolkit.devices import Memory
from toolkit.errors import DeviceError


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        ("growth", Memory(growth=True)),
        ("all", Memory()),
        ("0.4", Memory(fraction=0.4)),
        (0.4, Memory(fraction=0.4)),
        ("1.0", Memory(fraction=1.0)),
        ("4096", Memory(limit_mib=4096)),
        (4096, Memory(limit_mib=4096)),
        ("4096 MiB", Memory(limit_mib=4096)),
    ],
)
def test_the_four_ways(value, memory):
    assert Memory.parse(value) == memory
    assert Memory.parse(str(memory)) == memory


@pytest.mark.parametrize(
    "value", ["1.5", "-3", "-0.5", "0", "0.0", "1", "growth,4096", "0.4+growth", "lots", "", "nan", "1e3", "9" * 400]
)
def test_anything_else_is_refused(value):
    with pytest.raises(DeviceError, match="memory="):
        Memory.parse(value)


def test_a_fraction_is_of_the_cards_total():
    assert Memory.parse(0.4).per_logical_device(40960, 1) == 16384
    assert Memory.parse(0.4).per_logical_device(40960, 2) == 8192


def test_splitting_a_whole_card_keeps_a_tenth_back():
    assert Memory.parse("all").per_logical_device(10000, 3) == 3000
    assert Memory.parse("all").per_logical_device(10000, 1) is None


def test_limits_must_fit_the_card():
    with pytest.raises(DeviceError, match="at most 7680"):
        Memory.parse(8000).per_logical_device(15360, 2)
    with pytest.raises(DeviceError, match="NVML doesn't say"):
        Memory.parse(0.4).per_logical_device(None, 1)
