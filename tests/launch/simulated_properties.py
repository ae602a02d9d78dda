"""What must hold in every schedule of a simulated job, and the rare states that schedules must come to."""

import itertools
import re

from toolkit.errors import JobStopped

RARE = {
    "a second fault within a recovery",
    "a fault while a checkpoint is written",
    "a host back while a checkpoint is written",
    "an attempt that ends while a host joins it",
    "a stop and a failure at one tick",
}
# Simulated seconds. After the last fault, once all hosts are there again, a job makes a step, or ends, within the limit
# of a stall (120), what it takes to ask for stacks and to end its tasks, the longest pause before a restart that two
# restarts in vain have, and a call to a host that doesn't answer.
GOES_ON_WITHIN = 200.0
STOPS_WITHIN = 60.0  # The grace and what hosts take to answer; a failure that was being handled comes before it.


def no_progress(world):
    """Returns the times in which a job that nothing bothers any more made no step for too long."""
    calm = max([world.whole_again, *(fault.at for fault in world.faults)], default=0.0)
    after = [calm, *(at for at in world.progress if at > calm), max(calm, world.over)]
    longest = max(later - earlier for earlier, later in itertools.pairwise(after))
    return [f"no step for {longest:.0f} s after the last fault"] if longest > GOES_ON_WITHIN else []


def problems(world, events, error, *, most):
    """Returns what isn't as it must be, in sentences."""
    found = [*wrong_causes(world, events, error), *wrong_counts(world, events, error, most), *no_progress(world)]
    if error is None and world.step != world.total:
        found.append(f"it is done after {world.step} of {world.total} steps")
    if isinstance(error, JobStopped):
        if world.stopped_at is None:
            found.append("it was stopped, and nobody had asked for that")
        elif world.over - world.stopped_at > STOPS_WITHIN:
            found.append(f"it was stopped {world.over - world.stopped_at:.0f} s after that was asked for")
    if world.left_over:
        found.append(f"{len(world.left_over)} tasks still ran when the next attempt began")
    left = [task.name for task in world.every_task() if task.alive]
    return [*found, *([f"still running: {left}"] if left else [])]


def wrong_causes(world, events, error):
    """Returns the failures whose message names none of the faults that were injected into their attempt."""
    texts, number = {}, 0
    for event in events:
        if event["event"] == "attempt":
            number = event["number"]
        elif event["event"] == "restart":
            texts[number] = event["text"]
    if error is not None and not isinstance(error, JobStopped):
        texts[number] = str(error)
    found = []
    for number, text in texts.items():
        patterns = [fault.says for fault in world.faults if fault.attempt == number]
        if not any(re.search(pattern, text) for pattern in patterns):
            found.append(f"attempt {number}: {patterns} and not: {text[:300]}")
    return found


def wrong_counts(world, events, error, most):
    """Returns restarts that are counted otherwise than by the progress that the supervisor was told of."""
    found, in_vain, best, reached = [], 0, {}, {}
    for event in events:
        if event["event"] in ("attempt", "restart", "end"):  # One that ends for a host that is back is no restart.
            if any(value > best.get(name, 0) for name, value in reached.items()):
                in_vain = 0
            best = {name: max(best.get(name, 0), reached.get(name, 0)) for name in {*best, *reached}}
        if event["event"] == "attempt":
            reached = world.reached.get(event["number"], {})
        elif event["event"] in ("restart", "end"):
            in_vain += event["event"] == "restart"
            if event["event"] == "restart" and (event["in_vain"] != in_vain or in_vain > most):
                found.append(f"restart {event['used']} counts as {event['in_vain']} in vain, and was {in_vain}")
    if error is not None and not isinstance(error, JobStopped) and in_vain < most:
        found.append(f"it ended after {in_vain} of {most} restarts in vain: {error}")
    return found
