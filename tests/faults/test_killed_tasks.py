"""kill -9 of each kind of task at each moment: noticed, named, started again, and the weights of an undisturbed run."""

import math

import faulty
import limits
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

KILLED = {
    "worker:1": ("worker:1", "workers"),
    "worker:0": ("worker:0", "workers"),
    "worker:1, compressed": ("worker:1", "compressed"),
    "worker:1, local steps": ("worker:1", "local"),
    "ps:0": ("ps:0", "served"),
    "evaluator:0": ("evaluator:0", "served"),
}


PARAMS = [pytest.param(name, id=name, marks=[pytest.mark.first] if name == "worker:1" else []) for name in KILLED]


@pytest.fixture(scope="module", params=PARAMS)
def killed(request, tmp_path_factory):
    """One job, whose task is killed at every moment: its name, what came of each, and the weights at the end."""
    folder = tmp_path_factory.mktemp("killed")
    task, kind = KILLED[request.param]
    with faulty.faulty(folder, kind, "--max_restarts=16") as job:
        outcomes = job.disturb(task, faulty.MOMENTS)
        return request.param, outcomes, job.finish()


@pytest.mark.parametrize("moment", faulty.MOMENTS)
def test_it_is_noticed_and_named_and_the_job_goes_on(killed, moment, measured):
    name, outcomes, _ = killed
    task, _ = KILLED[name]
    found = outcomes[moment]
    measured(
        f"SIGKILL of {name} {moment}",
        seconds_to_notice=found.notice,
        seconds_to_group_down=found.down,
        seconds_to_steps_again=found.again,
    )
    assert f"{task} failed first: it was ended by SIGKILL" in found.said
    limits.keep(found.down, faulty.within(15))
    assert not math.isnan(found.again)
    limits.keep(found.again, faulty.within(30))
    assert found.resumed == found.kept


def test_the_weights_are_those_of_an_undisturbed_run(killed, undisturbed, measured):
    name, outcomes, weights = killed
    measured(f"SIGKILL of {name} at four moments: final weights", restarts=len(outcomes))
    assert weights == undisturbed(KILLED[name][1])
