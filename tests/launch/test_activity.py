"""Computing is progress; what the threads of a task that hangs use now and then is none."""

from toolkit.launch.agent.process import Activity


def seen(*, share, seconds):
    """How often a task that uses this share of a core counts as computing."""
    now = 0.0
    activity, count = Activity(clock=lambda: now), 0
    while now < seconds:
        now += 0.05
        count += activity.computes(share * now)
    return count


def test_the_threads_of_a_hung_task_are_no_progress_however_long_it_hangs():
    assert seen(share=2.5 / 1800, seconds=20_000) == 0


def test_a_core_at_work_is_progress_every_second():
    assert seen(share=1.0, seconds=60) >= 50


def test_one_that_shares_its_core_with_others_is_progress_too():
    assert seen(share=0.1, seconds=60) >= 5


def test_work_after_a_long_wait_is_progress_at_once():
    now = 0.0
    activity = Activity(clock=lambda: now)
    now = 1000.0
    assert not activity.computes(1.4)
    now = 1001.5
    assert activity.computes(2.9)
