"""A job under a simulated clock: the supervisor's own code, with agents, tasks and faults that a seed decides.

Nothing is started and nothing waits: a schedule of some minutes takes a fraction of a second. Tasks behave as
TensorFlow's do: they step together; where one ends suddenly the others fail some time later, abort, or wait for ever.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import random
import signal
import types

from toolkit import __version__
from toolkit.errors import ToolkitError
from toolkit.launch import display
from toolkit.launch.agent.connection import Lateness
from toolkit.launch.record import Record
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor import agents, state, supervise, task_group

LIMIT = 1800.0  # Simulated seconds that no job takes.
STEP = 0.5  # Seconds.
OF_TASKS = ("kill", "raise", "exit", "stop", "hang")
OF_HOSTS = ("crash", "silence")
SAYS = {
    "kill": "{} failed first: it was ended by SIGKILL",
    "raise": "{} failed first: it ended with exit code 1",
    "exit": "{} failed first: it ended with exit code 9",
    "stop": "{} failed first: it was stopped by a signal",
    "hang": r"{},? (which is )?at train\.py, line 31",
    "crash": "The agent on {} is gone",
    "silence": "The agent on {} is gone",
}


class HangError(Exception):
    """The supervisor did not come to an end."""


@dataclasses.dataclass
class Fault:
    """What was injected.

    Attributes:
        kind: One of OF_TASKS or OF_HOSTS.
        target: The task's or the host's name.
        attempt: The attempt's number in which it happened.
        at: When.
    """

    kind: str
    target: str
    attempt: int
    at: float

    @property
    def says(self):
        """A pattern of the message that names it."""
        return SAYS[self.kind].format(self.target)


class FakeTask:
    """One process of a task."""

    pids = itertools.count(1000)

    def __init__(self, name, agent, number):
        self.name, self.agent, self.attempt = name, agent, number
        self.pid = next(self.pids)
        self.alive, self.held, self.hangs, self.state, self.told = True, False, False, "starting", 0
        self.due = 0.0


class FakeAgent:
    """An agent, its connection and its tasks."""

    scratch, polled, unsent = "", True, b""

    def __init__(self, world, host):
        self.world, self.host, self.local = world, host, world.local
        self.tasks = {}
        self.inbox, self.ended, self.running = [], False, True
        self.lateness = Lateness()
        self.heard, self.due, self.asks = world.now, 0.0, 0.0
        delay = world.chance.uniform(0.1, 2.0)
        world.later(delay, self.ready)
        world.later(delay + 1, self.look)

    def ready(self):
        if self.silent or self.host.name in self.world.down:
            self.world.later(10.0 if self.silent else 0.0, self.lose)  # ssh gives up.
            return
        ports = [next(self.world.ports) for _ in range(self.host.tasks)]
        if self.world.writing and self.joins:
            self.world.seen.add("a host back while a checkpoint is written")
        self.tell("ready", version=__version__, host=self.host.name, ports=ports, shared=True, scratch="")

    @property
    def silent(self):
        return self.host.name in self.world.unreachable

    @property
    def joins(self):
        """Whether the job trains without this host, and calls it."""
        trains = any(task.alive and task.state == "training" for task in self.world.tasks.values())
        return trains and not (self.tasks or self.ended) and self.running

    @property
    def gone(self):
        return self.ended and not self.inbox

    @property
    def silence(self):
        return self.world.now - self.heard

    def fileno(self):
        return -1

    def last_line(self):
        return "its connection was closed"

    def read(self, **_):
        self.world.reads += 1
        if self.world.reads > 10_000:
            raise HangError("the supervisor waits without letting time pass")
        found, self.inbox = self.inbox, []
        return found

    def tell(self, kind, **facts):
        """Sends an event. What a task says comes to its agent in order, and may be overtaken by what others say."""
        task = self.tasks.get(facts.get("task"))
        if not self.world.reorders or (task is None and kind != "looked"):
            self.transmit(kind, facts)
            return
        if task is None:  # It has read what its tasks have said by then.
            due = max((each.due for each in self.tasks.values()), default=0.0)
        else:
            # A report says when it was made; of an end the agent learns at its next look.
            most = 0.4 if kind == "report" else 0.05
            due = task.due = max(task.due, self.world.now + self.world.overtaken(most))
            if kind == "report":
                facts["ago"] = due - self.world.now
        self.world.later(due - self.world.now, lambda: self.transmit(kind, facts))

    def transmit(self, kind, facts):
        """Sends it on: late, doubled, or not at all where the network is gone; always in order."""
        if not self.running or self.ended:
            return
        # From the first event a supervisor takes how a host's clock stands to its own.
        delay = 0.01 if kind == "ready" else self.world.delay(self.host.name)
        self.due = max(self.due, self.world.now + delay)
        facts["sent"] = self.world.now + 1000.0 * int(self.host.name[1:])  # Each host has its own clock.
        again = 1 + (kind in ("report", "sample", "ended", "started") and self.world.doubles())
        for _ in range(again):
            self.world.later(self.due - self.world.now, lambda: self.arrive({"event": kind, **facts}))

    def arrive(self, event):
        if not (self.silent or self.ended):
            self.heard = self.world.now
            self.inbox.append({**event, "late": self.lateness.of(event["sent"], self.world.now)})
            self.world.delivered(event)

    def send(self, kind, **facts):
        if self.ended or self.silent:
            return
        self.asks = max(self.asks, self.world.now + self.world.delay(self.host.name))
        self.world.later(self.asks - self.world.now, lambda: self.running and self.asked(kind, facts))

    def asked(self, kind, facts):
        if kind == "start":
            self.world.starts(self, facts)
        elif kind == "signal":
            self.world.signalled(self, facts.get("number"))
        elif kind == "kill":
            self.world.end(self.tasks[facts["task"]], -signal.SIGKILL)
        elif kind == "look":
            self.look(again=False)
            self.tell("looked", number=facts.get("number"))
        elif kind == "finish":
            self.finish()
        elif kind == "stacks":
            for task in self.tasks.values():
                if task.alive and not task.held and task.state == "training":
                    self.tell("stacks", task=task.name, text=STACKS["hangs" if task.hangs else "waits"])

        elif kind == "nccl":
            self.world.asked_nccl += 1
            if self.world.nccl is not None:
                self.tell("nccl", text=self.world.nccl)

    def look(self, *, again=True):
        if not self.running:
            return
        for task in self.tasks.values():
            if task.alive:
                if task.state == "training" and not task.held and task.told != self.world.step:
                    task.told = self.world.step
                    self.tell("report", task=task.name, facts=self.world.facts(task), ago=0.0)
                how = {"cpu": 5.0, "memory": 1, "computes": task.state == "starting", "stopped": task.held}
                self.tell("sample", task=task.name, dying=False, phase=None, **how)
        if again:
            self.tell("note2")  # Something is sent once a second.
            self.world.later(1.0, self.look)

    def finish(self):
        for task in self.tasks.values():
            self.world.end(task, -signal.SIGKILL)

    def lose(self):
        """The connection is closed."""
        self.ended = True

    def close(self):
        """The supervisor hangs up: the agent ends its tasks, at once or when it misses the heartbeats."""
        self.ended = True
        self.world.later(self.world.silence if self.silent else 0.2, self.die)

    def die(self):
        self.finish()
        self.running = False


_FRAMES = {
    "waits": ["/x/tensorflow/python/eager/execute.py", "/x/keras/src/backend/tensorflow/trainer.py"],
    "hangs": ["/home/me/train.py", "/x/keras/src/backend/tensorflow/trainer.py"],
}
STACKS = {
    kind: "Current thread 0x1 (most recent call first):\n"
    + "".join(f'  File "{file}", line 31 in {"fit" if "trainer" in file else "step"}\n' for file in files)
    for kind, files in _FRAMES.items()
}


class FakeBackend(agents.Backend):
    """Hosts of the world."""

    remedy = "See {host}"

    def __init__(self, world, spec):
        self.world, self.spec = world, spec
        self.hosts = world.hosts
        self.addresses = {host: f"10.0.0.{number}" for number, host in enumerate(self.hosts, start=1)}

    def call(self, host):
        agent = FakeAgent(self.world, host)
        self.world.agents.append(agent)
        return agent


class World:
    """The clock, the hosts, the training and what happens to it.

    Args:
        seed: Decides everything.
        hosts: How many; 1 for this machine itself.
        tasks: How many on each.
        steps: Of the whole training.
        faults: How many are injected.
        stops: Whether somebody stops the job: at some time, or together with a fault.
        communication: What tasks report of how they exchange tensors.
        nccl: What NCCL answers; None where it never does.
    """

    def __init__(self, seed, *, hosts=2, tasks=2, steps=60, faults=1, stops=False, communication="ring", nccl=None):
        self.chance = random.Random(seed)
        self.local = hosts == 1
        self.hosts = tuple(Host(f"h{number}", tasks) for number in range(hosts))
        self.now, self.queue, self.count = 0.0, [], itertools.count()
        self.reads = 0
        self.ports = itertools.count(20000)
        self.agents, self.tasks, self.number = [], {}, 0
        self.total, self.step, self.checkpoint, self.reached = steps, 0, 0, {}
        self.down, self.unreachable = set(), set()
        self.faults, self.left_over, self.silence, self.whole_again = [], [], 15.0, 0.0
        self.communication, self.nccl, self.asked_nccl = communication, nccl, 0
        self.writing = self.stopping = False
        self.received, self.stopped_at, self.seen, self.progress = [], None, set(), []
        self.reorders = self.chance.random() < 0.5
        self.slow = {host.name: self.chance.choice([0.0, 0.0, 0.1, 0.3]) for host in self.hosts}
        self.doubled = self.chance.choice([0.0, 0.0, 0.2])
        kinds = [*OF_TASKS, *(() if self.local else OF_HOSTS)]
        weights = [self.chance.choice([0, 1, 1, 5]) for _ in kinds]
        weights = weights if any(weights) else [1] * len(kinds)
        at = 0.0
        for _ in range(faults):
            # Far apart, within a recovery, or at the same time.
            at += self.chance.choice([60.0, 20.0, 3.0, 0.0]) * self.chance.uniform(0.2, 1.5)
            (kind,) = self.chance.choices(kinds, weights)
            early = self.chance.random() < 0.4
            self.later(at + 4.0, functools.partial(self.inject, kind, early=early))
        self.stops_with_fault = stops and self.chance.random() < 0.5
        if stops and not self.stops_with_fault:
            self.later(self.chance.uniform(1.0, 120.0), self.stop)

    # The clock.

    def later(self, seconds, do):
        heapq.heappush(self.queue, (self.now + max(0.0, seconds), next(self.count), do))

    def advance(self, seconds):
        end = self.now + max(seconds, 0.001)
        while self.queue and self.queue[0][0] <= end:
            self.now, _, do = heapq.heappop(self.queue)
            do()
        self.now, self.reads = end, 0
        if self.now > LIMIT:
            raise HangError(f"the job goes on after {self.now:.0f} s")

    def monotonic(self):
        return self.now

    # The network.

    def delay(self, host):
        held_up = self.chance.uniform(0, 3) if self.chance.random() < self.slow[host] else 0.0
        return self.chance.uniform(0.001, 0.02) + held_up

    def overtaken(self, most):
        return self.chance.choice([0.0, 0.0, self.chance.uniform(0.0, most)])

    def doubles(self):
        return self.chance.random() < self.doubled

    def delivered(self, event):
        if event["event"] == "report":
            facts = event["facts"]
            known = self.reached.setdefault(self.number, {})
            known.update({n: max(facts[n], known.get(n, 0)) for n in ("step", "checkpoint") if n in facts})

    # The tasks.

    def starts(self, agent, facts):
        if facts["attempt"] != self.number:
            self.number, self.step = facts["attempt"], self.checkpoint
            self.left_over += [t for t in self.every_task() if t.alive and not t.agent.silent and t.agent.running]
            self.tasks, self.writing, self.stopping = {}, False, False
            self.expected = {name for job in facts["cluster"] for name in self.names(facts["cluster"], job)}
        agent.tasks = {name: FakeTask(name, agent, self.number) for name in facts["tasks"]}
        self.tasks.update(agent.tasks)
        for task in agent.tasks.values():
            agent.tell("started", task=task.name, pid=task.pid)
        if set(self.tasks) == self.expected:
            number = self.number
            self.later(self.chance.uniform(1, 4), lambda: self.train(number))

    @staticmethod
    def names(cluster, job):
        return [f"{job}:{number}" for number in range(len(cluster[job]))]

    def every_task(self):
        return [task for agent in self.agents for task in agent.tasks.values()]

    def healthy(self):
        tasks = self.tasks.values()
        return all(t.alive and not t.held and not t.hangs and not t.agent.silent for t in tasks)

    def train(self, number):
        if number != self.number or not self.healthy():
            return
        for task in self.tasks.values():
            task.state = "training"
            task.agent.tell("report", task=task.name, facts=self.facts(task), ago=0.0)
        if self.step < self.total:
            self.later(STEP, lambda: self.make_step(number))
        else:
            self.go_on(number)

    def make_step(self, number):
        if number != self.number or not self.healthy() or self.stopping:
            return
        self.step += 1
        self.progress.append(self.now)
        if self.step % 10 == 0 or self.step == self.total:
            self.save(lambda: self.go_on(number))
        else:
            self.later(STEP, lambda: self.make_step(number))

    def go_on(self, number):
        """What follows when a checkpoint is written."""
        if number != self.number or not self.healthy() or self.stopping:
            return
        if self.step < self.total:
            self.later(STEP, lambda: self.make_step(number))
            return
        for task in self.tasks.values():
            task.state = "ending"
            task.agent.tell("report", task=task.name, facts={"state": "ending"}, ago=0.0)
            self.later(self.chance.uniform(0.1, 2), lambda task=task: self.end(task, 0))

    def save(self, then):
        """The chief writes a checkpoint, which counts when it is whole; the others wait for it."""
        chief, step, number = self.tasks["worker:0"], self.step, self.number
        self.writing = True

        def written():
            if number != self.number:
                return
            self.writing = False
            if chief.alive and not chief.held and not chief.hangs:
                self.checkpoint = step
                facts = {"checkpoint": step, "checkpoints": "here"}
                chief.agent.tell("report", task=chief.name, facts=facts, ago=0.0)
                then()

        self.later(self.chance.choice([0.0, 0.3, 3.0]) * self.chance.uniform(0.5, 1.5), written)

    def facts(self, task):
        step = {"step": self.step} if task.state == "training" else {}
        return {"state": task.state, "communication": self.communication, **step}

    def signalled(self, agent, number):
        """Asks an agent's tasks to end: those that can agree on a step do so after it, with a checkpoint."""
        for task in agent.tasks.values():
            if task.alive and task.state == "starting" and not task.held:
                self.end(task, -number)
        if self.healthy() and self.tasks and all(t.state == "training" for t in self.tasks.values()):
            if not self.stopping:
                self.stopping = True
                self.save(lambda: self.leave(number))
            return
        if self.stopping and not self.writing:
            self.leave(number)

    def leave(self, number):
        """All tasks end after the checkpoint that they agreed on."""
        for task in self.tasks.values():
            self.later(self.chance.uniform(0.2, 1.5), lambda task=task: self.end(task, 128 + number))

    def end(self, task, code, *, sudden=False):
        if not task.alive:
            return
        trained = task.state == "training"
        task.alive = False
        task.agent.tell("output", task=task.name, text="")
        task.agent.tell("ended", task=task.name, pid=task.pid, code=code)
        if trained and (sudden or code in (1, 9)) and task.attempt == self.number:
            self.strand(task)

    def strand(self, gone):
        """The others notice that a task is gone: they fail, abort, or wait."""
        for task in self.tasks.values():
            if task is gone or not task.alive or task.held or task.hangs:
                continue
            how = self.chance.choice(["fails", "aborts", "waits"])
            when = self.chance.uniform(0.02, 2.0)
            if how == "fails":
                self.later(when, lambda task=task: self.fail(task, 1))
            elif how == "aborts":
                self.later(when, lambda task=task: self.end(task, -signal.SIGABRT))

    def fail(self, task, code):
        if task.alive and not task.held:
            task.agent.tell("report", task=task.name, facts={"state": "failed"}, ago=0.0)
            self.later(self.chance.uniform(0.01, 0.5), lambda: self.end(task, code))

    # The faults.

    def stop(self):
        """Somebody stops the job by a signal to its launcher."""
        if self.stopped_at is None:
            self.stopped_at = self.now
            self.received.append(signal.SIGTERM)

    def strikes(self, kind, target):
        """Notes a fault, and in which rare state of the job it comes."""
        if self.number > 1 and not any(t.state == "training" for t in self.tasks.values()):
            self.seen.add("a second fault within a recovery")
        if any(agent.joins for agent in self.agents if agent.host.name not in self.down):
            self.seen.add("an attempt that ends while a host joins it")
        if self.writing:
            self.seen.add("a fault while a checkpoint is written")
        if self.stops_with_fault:
            self.stop()
            self.seen.add("a stop and a failure at one tick")
        self.faults.append(Fault(kind, target, self.number, self.now))

    def inject(self, kind, *, early=False):
        """Injects a fault into a task that trains, or that only starts where it is to come `early`."""
        if kind in OF_HOSTS:
            self.inject_host(kind, early=early)
            return
        states = ("starting", "training") if early and kind in ("kill", "exit") else ("training",)
        those = [t for t in self.tasks.values() if t.alive and t.state in states and t.agent.running]
        those = [t for t in those if not (t.held or t.hangs or t.agent.silent or t.agent.ended)]
        if not those:
            if self.step < self.total:
                self.later(0.2 if early else 1.0, lambda: self.inject(kind, early=early))
            return
        task = self.chance.choice(those)
        self.strikes(kind, task.name)
        if kind == "kill":
            self.end(task, -signal.SIGKILL, sudden=True)
        elif kind == "exit":
            self.end(task, 9)
        elif kind == "raise":
            task.agent.tell("report", task=task.name, facts={"state": "failed"}, ago=0.0)
            self.later(self.chance.uniform(0.01, 0.3), lambda: self.end(task, 1))
        elif kind == "stop":
            task.held = True
        else:
            task.hangs = True

    def inject_host(self, kind, *, early=False):
        states = ("starting", "training") if early else ("training",)
        there = [a for a in self.agents if a.running and not a.ended and not a.silent and a.tasks]
        there = [a for a in there if any(t.alive and t.state in states for t in a.tasks.values())]
        if not there:
            if self.step < self.total:
                self.later(0.2 if early else 1.0, lambda: self.inject_host(kind, early=early))
            return
        agent = self.chance.choice(there)
        name = agent.host.name
        self.strikes(kind, name)
        back = self.chance.uniform(1, 90)
        self.whole_again = max(self.whole_again, self.now + back + (self.silence if kind == "silence" else 0.0))
        if kind == "crash":
            self.down.add(name)
            for task in agent.tasks.values():
                self.end(task, -signal.SIGKILL, sudden=True)
            agent.running, agent.ended = False, True
            self.later(back, lambda: self.down.discard(name))
        else:
            self.unreachable.add(name)
            self.later(self.silence, lambda: self.die_alone(agent))
            self.later(back + self.silence, lambda: self.unreachable.discard(name))
            gone = next(iter(agent.tasks.values()))
            self.later(self.chance.uniform(5, 10), lambda: self.strand(gone))

    @staticmethod
    def die_alone(agent):
        """An agent that hears nothing of its supervisor ends its tasks."""
        if agent.silent:
            agent.die()


class Selector:
    """In the place of TaskGroup's selector: waits by the world's clock."""

    def __init__(self, world):
        self.world = world

    def select(self, seconds):
        self.world.advance(seconds)
        return []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing is held."""

    def register(self, *_):
        """Every agent is read at every turn."""

    unregister = register

    def close(self):
        """Nothing is held."""


class FakeDisplay:
    """Keeps what is said."""

    live = None

    def __init__(self, **_):
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing is held."""

    def say(self, message):
        self.said.append(message)

    def release(self, **_):
        return {}

    def expect(self, *_):
        """Nothing is shown."""

    lines = hold = draw = expect


def run(monkeypatch, folder, world, *, settle=True, **options):
    """Runs a job in a world to its end, and some minutes more unless it is not to `settle`.

    Returns:
        Its record's events, and the error that it ended in.
    """
    clock = types.SimpleNamespace(monotonic=world.monotonic, sleep=world.advance, time=world.monotonic)
    for module in (agents, task_group, state, supervise, display):
        monkeypatch.setattr(module, "time", clock)
    select = types.SimpleNamespace(DefaultSelector=lambda: Selector(world), EVENT_READ=1)
    monkeypatch.setattr(task_group, "selectors", select)
    monkeypatch.setattr(agents, "selectors", select)
    monkeypatch.setattr(supervise, "Display", FakeDisplay)
    thread = types.SimpleNamespace(start=lambda: None)
    threads = types.SimpleNamespace(Thread=lambda **_: thread, Event=lambda: types.SimpleNamespace(set=lambda: None))
    monkeypatch.setattr(agents, "threading", threads)
    workers = sum(host.tasks for host in world.hosts)
    where = "local" if world.local else f"ssh:{','.join(f'{host.name}:{host.tasks}' for host in world.hosts)}"
    spec = JobSpec(
        command=("train.py",),
        on=where,
        workers=workers if world.local else None,
        log_dir=str(folder),
        **{"stall_timeout": 120.0, **options},
    )
    record = Record.begin(spec)
    error = None
    try:
        supervise.supervise(spec, lambda: FakeBackend(world, spec), received=world.received, record=record)
    except ToolkitError as found:
        error = found
    world.over = world.now
    events = Record(record.directory).new()
    if settle:
        with contextlib.suppress(HangError):
            world.advance(2 * world.silence + 200)
    return events, error
