"""Workers of a parameter server job die: every step is done once all the same, and the chief ends by itself."""

import json
import re
import signal
import time

import faulty
import limits
import processes
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = processes.ROOT / "tests" / "multiprocess" / "served.py"
EPOCHS, STEPS, BATCH = 2, 600, 16


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*flags):
        options = {"epochs": EPOCHS, "steps": STEPS, "width": 512}
        command = [str(SCRIPT), "out.json", json.dumps(options)]
        started.append(processes.Job(tmp_path, [*processes.SERVED, *flags], command))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(30)


def batches(job):
    return len(re.findall(r"batch \d+\n", job.text))


def ended(job, folder):
    """Seconds from the script's last line to the end of the job, whose steps all count once."""
    assert job.wait(limit=150) == 0, job.text[-3000:]
    seen = json.loads((folder / "out.json").read_text())
    assert seen["iterations"] == seen["updates"] == EPOCHS * STEPS
    assert seen["history"]["seen"] == [STEPS * BATCH] * EPOCHS
    return time.time() - (folder / "out.json").stat().st_mtime


def test_a_killed_worker_is_done_without_and_the_chief_ends_by_itself(job, tmp_path, measured):
    run = job()
    run.until(r"batch 60\n")
    killed, before = run.kill("worker:0"), batches(run)
    run.until(lambda: batches(run) > before)
    again = time.monotonic() - killed
    seconds = ended(run, tmp_path)
    measured(
        "SIGKILL of one of two workers of a job with parameter servers, not restarted",
        seconds_to_steps_again=again,
        seconds_to_end_after_training=seconds,
    )
    assert "worker:0 was ended by SIGKILL; the job goes on without it" in run.text
    limits.keep(again, faulty.within(30))
    limits.keep(seconds, faulty.within(10))


def test_all_workers_are_lost_and_come_back(job, tmp_path, measured):
    run = job("--max_restarts=2")
    run.until(r"batch 60\n")
    run.kill("worker:1")
    killed = run.kill("worker:0")
    run.until(r"restart 2 of 2")  # What the chief had been sent before comes in the meantime.
    before = batches(run)
    run.until(lambda: batches(run) > before + 1)
    again = time.monotonic() - killed
    seconds = ended(run, tmp_path)
    measured(
        "SIGKILL of both workers of a job with parameter servers, both restarted",
        seconds_to_steps_again=again,
        seconds_to_end_after_training=seconds,
    )
    assert "restart 2 of 2" in run.text
    assert "starting the job again" not in run.text
    limits.keep(again, faulty.within(30))
    limits.keep(seconds, faulty.within(10))


@pytest.mark.parametrize("restarts", [0, 1])
def test_all_workers_are_lost_and_not_all_come_back(job, restarts, measured):
    """TensorFlow takes none back before all are there, and waits without a word."""
    run = job(f"--max_restarts={restarts}")
    run.until(r"batch 60\n")
    run.kill("worker:1")
    killed = run.kill("worker:0")
    assert run.wait(limit=60) != 0
    seconds = time.monotonic() - killed
    measured(
        f"SIGKILL of both workers of a job with parameter servers, --max_restarts={restarts}",
        seconds_to_group_down=seconds,
    )
    assert "No worker is left" in run.text
    assert re.search(r"worker:\d failed first: it was ended by SIGKILL", run.text)
    limits.keep(seconds, faulty.within(15))


def test_a_stopped_worker_is_done_without(job, tmp_path, measured):
    run = job("--heartbeat_timeout=5")
    run.until(r"batch 60\n")
    stopped = run.kill("worker:0", signal.SIGSTOP)
    run.until(r"worker:0 was stopped for longer than --heartbeat_timeout; ending it")
    seconds = time.monotonic() - stopped
    measured(
        "SIGSTOP of one of two workers of a job with parameter servers, --heartbeat_timeout=5",
        seconds_to_notice=seconds,
    )
    ended(run, tmp_path)
    limits.keep(seconds, 5 + faulty.within(5))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGKILL, "it was ended by SIGKILL", marks=pytest.mark.first),
        (signal.SIGSTOP, "it was stopped by a signal (SIGSTOP or the like)"),
    ],
)
def test_a_lost_ps_ends_the_job(job, number, said, measured):
    run = job("--heartbeat_timeout=5")
    run.until(r"batch 60\n")
    lost = run.kill("ps:1", number)
    assert run.wait(limit=90) != 0
    seconds = time.monotonic() - lost
    measured(f"{number.name} of a ps, --heartbeat_timeout=5", seconds_to_group_down=seconds)
    assert f"ps:1 failed first: {said}" in run.text
    limits.keep(seconds, 5 + faulty.within(15))


def test_a_killed_chief_has_the_job_started_again(tmp_path, measured):
    with faulty.faulty(tmp_path, "served", "--max_restarts=1") as job:
        (found,) = job.disturb("chief:0", ["in a step"]).values()
        measured(
            "SIGKILL of chief:0 of a job with parameter servers, in a step",
            seconds_to_notice=found.notice,
            seconds_to_group_down=found.down,
            seconds_to_steps_again=found.again,
        )
        assert "chief:0 failed first: it was ended by SIGKILL" in found.said
        assert found.resumed == found.kept > 0
        limits.keep(found.down, faulty.within(15))
        limits.keep(found.again, faulty.within(30))
