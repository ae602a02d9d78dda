"""Two hosts, which are network namespaces, cut off from each other without a word, with a launcher on each."""

import re
import time

import faulty
import pytest
import two_hosts

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

HEARTBEAT = 15
FLAGS = ("--data=shapes", "--epochs=1", "--steps_per_epoch=100000", "--checkpoint_steps=5", "--global_batch_size=32")


class Pair:
    """The multi-worker recipe on both hosts."""

    def __init__(self, names, folder):
        self.names = names
        self.folder = folder
        self.running = [
            two_hosts.start(
                name,
                folder,
                "toolkit",
                "launch",
                two_hosts.cluster_in(folder),
                f"--log_dir=logs{number}",
                f"--heartbeat_timeout={HEARTBEAT}",
                "-m",
                "recipes.cifar_multi_worker",
                f"--run_dir=run{number}",
                *FLAGS,
            )
            for number, name in enumerate(names)
        ]
        self.progress(limit=90)

    def step(self):
        found = [int(path.name.split("-")[1]) for path in (self.folder / "run0" / "checkpoints").glob("step-*")]
        return max(found, default=0)

    def progress(self, *, limit):
        """Seconds until there is a new checkpoint; None where a process ends first."""
        began, before = time.monotonic(), self.step()
        while self.step() <= before:
            if any(process.poll() is not None for process in self.running):
                return None
            assert time.monotonic() - began < limit
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self):
        for process in self.running:
            process.terminate()
        return two_hosts.finish(self.running, 60)


@pytest.fixture
def pair(tmp_path):
    with two_hosts.made() as names:
        started = Pair(names, tmp_path)
        yield started
        started.end()


@pytest.mark.parametrize("seconds", [2, 10])
def test_a_short_one_is_survived(pair, seconds, measured):
    two_hosts.part(pair.names)
    time.sleep(seconds)
    two_hosts.heal(pair.names)
    pair.progress(limit=60)  # What was under way.
    again = pair.progress(limit=60)
    assert again is not None, "\n".join(text[-2500:] for text in pair.end())
    measured(f"silent partition for {seconds} s, --heartbeat_timeout={HEARTBEAT}", seconds_to_steps_again=again)


def test_a_long_one_ends_the_job_on_both_sides_and_is_named(pair, measured):
    two_hosts.part(pair.names)
    began = time.monotonic()
    ends = {}
    while len(ends) < 2:
        for number, process in enumerate(pair.running):
            if process.poll() is not None:
                ends.setdefault(number, time.monotonic() - began)
        assert time.monotonic() - began < 90, f"ended: {ends}"
        time.sleep(0.05)
    texts = pair.end()
    measured(
        f"silent partition for good, --heartbeat_timeout={HEARTBEAT}",
        seconds_to_notice=min(ends.values()),
        seconds_to_group_down=max(ends.values()),
    )
    for text in texts:
        assert re.search(r"worker:\d failed first", text), text[-2500:]
        assert re.search(r"(?i)heartbeat|unavailable|deadline|gone|can't be reached", text), text[-2500:]
    assert max(ends.values()) < HEARTBEAT + faulty.within(15)
