"""The launcher itself is killed, or told to stop: nothing is left, and the run can be gone on with."""

import signal
import time

import faulty
import limits
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One run, started again after each kill of its launcher: seconds until nothing is left, and the weights."""
    base = tmp_path_factory.mktemp("launcher")
    seconds = {}
    for number, moment in enumerate((*faulty.MOMENTS, None)):
        held = base / "run" / "checkpoints"
        resume = any(held.glob("step-*"))
        with faulty.faulty(base / f"start-{number}", "workers", run=base / "run", resume=resume) as job:
            before = job.checkpoints()
            job.until(lambda job=job: len(job.events("started")) == 2)
            if moment is None:
                return seconds, job.finish()
            job.reach(moment, "worker:0", before)
            job.process.kill()
            seconds[moment] = job.gone(limit=15)
    raise AssertionError("not reached")


@pytest.mark.parametrize("moment", faulty.MOMENTS)
def test_a_killed_launcher_leaves_no_process(killed, moment, measured):
    measured(f"SIGKILL of the launcher {moment}", seconds_to_group_down=killed[0][moment])
    limits.keep(killed[0][moment], faulty.within(10))


def test_the_run_goes_on_to_the_weights_of_an_undisturbed_one(killed, undisturbed, measured):
    measured("SIGKILL of the launcher at four moments: final weights", restarts=len(killed[0]))
    assert killed[1] == undisturbed("workers")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.first),  # Ctrl-C.
        pytest.param(signal.SIGHUP, marks=pytest.mark.first),  # A lost terminal.
    ],
)
def test_a_launcher_that_is_told_to_stop_ends_its_tasks_with_a_checkpoint(tmp_path, number, measured):
    with faulty.faulty(tmp_path, "workers", recipe=["--epochs=50"]) as job:
        job.reach("in a step", "worker:0")
        before = job.newest()
        job.process.send_signal(number)
        began = time.monotonic()
        assert job.wait(limit=90) == 128 + number
        seconds = time.monotonic() - began
        measured(f"{number.name} to the launcher", seconds_to_group_down=seconds)
        assert job.left() == []
        assert job.newest() >= before
        assert all("checkpoint written" in log.read_text() for log in (tmp_path / "logs").glob("launch-*/worker-*.log"))
        limits.keep(seconds, faulty.within(15))
