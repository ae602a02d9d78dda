"""Two hosts, which are network namespaces, cut off from each other without a word, with a launcher on each."""

import re
import time

import faulty
import limits
import pytest
import two_hosts

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

HEARTBEAT = 15  # Seconds, as it is unless given. TensorFlow gives a heartbeat half of it to get through.
FLAGS = ("--data=shapes", "--epochs=1", "--steps_per_epoch=100000", "--checkpoint_steps=5", "--global_batch_size=32")


class Pair:
    """The multi-worker recipe on both hosts."""

    def __init__(self, names, folder, *flags):
        self.names = names
        self.folder = folder
        self.running = [
            two_hosts.start(
                name,
                folder,
                "toolkit",
                "launch",
                "--show=all",
                two_hosts.cluster_in(folder),
                f"--log_dir=logs{number}",
                *flags,
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
            assert time.monotonic() - began < limits.patient(limit)
            time.sleep(0.02)
        return time.monotonic() - began

    def said(self, number):
        """What a host's task has written."""
        logs = sorted((self.folder / f"logs{number}").glob(f"launch-*/worker-{number}*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def end(self):
        for process in self.running:
            process.terminate()
        return two_hosts.finish(self.running, 60)


@pytest.fixture
def pair(tmp_path):
    with two_hosts.made() as names:
        started = []

        def start(*flags):
            started.append(Pair(names, tmp_path, *flags))
            return started[-1]

        yield start
        for one in started:
            one.end()


def blip(pair, seconds):
    two_hosts.part(pair.names)
    time.sleep(seconds)
    two_hosts.heal(pair.names)


# TCP sends what was lost again after waits that double: a gap may be twice as long for what was sent in it.
@pytest.mark.parametrize(("seconds", "heartbeat"), [(2, 15), (10, 45)])
def test_one_of_less_than_a_quarter_of_the_heartbeats_timeout_is_survived(pair, seconds, heartbeat, measured):
    hosts = pair(f"--heartbeat_timeout={heartbeat}")
    blip(hosts, seconds)
    before = hosts.step()
    again = hosts.progress(limit=60)
    measured(f"silent partition for {seconds} s, --heartbeat_timeout={heartbeat}", seconds_to_steps_again=again)
    assert again is not None, "\n".join(text[-2500:] for text in hosts.end())
    assert hosts.step() > before


def test_a_longer_one_has_the_job_started_again_on_both_sides(pair, measured):
    hosts = pair("--max_restarts=2")
    blip(hosts, 10)
    began, before = time.monotonic(), hosts.step()
    while "Resumed after" not in hosts.said(0) or hosts.step() <= before:
        assert all(process.poll() is None for process in hosts.running), hosts.end()
        assert time.monotonic() - began < limits.patient(120)
        time.sleep(0.05)
    seconds = time.monotonic() - began
    measured("silent partition for 10 s, --heartbeat_timeout=15 --max_restarts=2", seconds_to_steps_again=seconds)
    limits.keep(seconds, HEARTBEAT + faulty.within(30))


def test_one_for_good_ends_the_job_on_both_sides_and_is_named(pair, measured):
    hosts = pair()
    two_hosts.part(hosts.names)
    began = time.monotonic()
    ends = {}
    while len(ends) < 2:
        for number, process in enumerate(hosts.running):
            if process.poll() is not None:
                ends.setdefault(number, time.monotonic() - began)
        assert time.monotonic() - began < limits.patient(90), f"ended: {ends}"
        time.sleep(0.05)
    texts = hosts.end()
    measured(
        f"silent partition that never ends, --heartbeat_timeout={HEARTBEAT}",
        seconds_to_notice=min(ends.values()),
        seconds_to_group_down=max(ends.values()),
    )
    for text in texts:
        assert re.search(r"worker:\d failed first", text), text[-2500:]
        assert re.search(r"(?i)heartbeat|unavailable|deadline|gone|can't be reached", text), text[-2500:]
    limits.keep(max(ends.values()), HEARTBEAT + faulty.within(15))
