"""Bandwidths and devices as people write them."""

import math

import pytest

from toolkit.errors import StrategyError
from toolkit.parallel.plan.step_cost import Link, Machine, bandwidth, device


def test_a_machine_needs_no_name():
    assert Machine(speed=1e12, inside=Link(bandwidth=1e9)).exchange_seconds(1e9, 0, replicas=2) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1Gbit", 125e6),
        ("100 Mbit/s", 12.5e6),
        ("2.5gbps", 312.5e6),
        ("16GB", 16e9),
        ("16GB/s", 16e9),
        ("1GiB", 1 << 30),
        ("800kbit", 1e5),
    ],
)
def test_a_bandwidth(text, size):
    assert bandwidth(text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["10", "1G", "fast", "0Gbit", "-1Gbit", "nanGbit", "1.2.3Gbit", ""])
def test_no_bandwidth(text):
    with pytest.raises(StrategyError, match="1Gbit"):
        bandwidth(text)


def test_a_device():
    assert device("v100")[1:] == (7e12, 900e9)
    assert device("500") == ("500 GFLOPS", 5e11, math.inf)
    assert device("1.5 TFLOPS")[1] == 1.5e12
    for text in ("V1000", "0", "-3", "1.2.3"):
        with pytest.raises(StrategyError, match="GFLOPS"):
            device(text)
