"""The share that can't be parallelised, from rates that a law makes, and what is said of measured ones."""

import pytest

from toolkit.observe.scaling import Size, bound, serial_share, verdict


def size(replicas, rate, *, batch=128, emulated=False, **parts):
    step = {"milliseconds": 100.0, "compute": 100.0 - sum(parts.values()), **parts} if parts else None
    return Size(replicas=replicas, examples_per_second=rate, global_batch=batch, emulated=emulated, step=step)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_share_that_made_the_rates_is_found_again(share):
    amdahl = [size(n, 1000 / (share + (1 - share) / n)) for n in (1, 2, 4, 8)]
    gustafson = [size(n, 1000 * (n - share * (n - 1))) for n in (1, 2, 4, 8)]
    assert serial_share(amdahl, weak=False) == pytest.approx(share, abs=1e-12)
    assert serial_share(gustafson, weak=True) == pytest.approx(share, abs=1e-12)


def test_more_speed_than_replicas_is_no_negative_share():
    assert serial_share([size(1, 100), size(2, 210)], weak=False) == 0
    assert serial_share([size(3, 100)], weak=False) is None


def test_what_bounds_a_step():
    assert bound(size(2, 1, communication=30.0, input=5.0)) == "communication"
    assert bound(size(2, 1, communication=5.0, input=40.0)) == "input"
    assert bound(size(2, 1, other=50.0)) == "other"
    assert bound(size(2, 1, communication=10.0)) == "compute"
    assert bound(size(2, 1)) is None


def test_strong_scaling_in_words():
    words = " ".join(verdict([size(1, 1000), size(4, 2500, communication=45.0, other=5.0)], weak=False))
    assert "4 replicas are 2.50 times as fast as one: an efficiency of 62%." in words
    assert "20% of one replica's time can't be parallelised (Amdahl's law)" in words
    assert "no number of replicas is more than 5.0 times as fast" in words
    assert "communication limits the speed (45% of a step). Give each replica more examples" in words
    assert "each replica has 32 examples" in words
    assert "cores" not in words


def test_weak_scaling_that_makes_nothing_faster_in_words():
    sizes = [size(1, 1000), size(2, 900, batch=256, communication=2.0)]
    words = " ".join(verdict(sizes, weak=True))
    assert "More replicas don't make it faster" in words
    assert "compute limits the speed" in words
    assert "The global batch grew from 128 to 256" in words


@pytest.mark.parametrize("weak", [False, True])
def test_of_replicas_that_share_cores_no_speed_is_judged(weak):
    """Neither a speed-up, nor a law's limit to it, nor what bounds it: only why not, what to do, and the batch."""
    sizes = [size(1, 1000, emulated=True), size(2, 1100, batch=256, emulated=True, communication=40.0)]
    why, batch = verdict(sizes, weak=weak)
    assert "share the same CPU cores" in why
    assert "with one GPU for each replica, or with one host for each" in why
    assert "times as fast" not in why + batch
    assert batch.startswith("The global batch")
    assert "times as fast as one" in " ".join(verdict([size(1, 1000), size(2, 1100)], weak=weak))
