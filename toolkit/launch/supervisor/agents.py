"""A job's hosts and the agents that start its tasks there: connected, called again, and laid out as a cluster."""

import itertools
import selectors
import threading
import time
from collections.abc import Mapping, Sequence

from toolkit import __version__, cluster
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import is_loopback, join
from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch.agent.connection import ConnectedAgent
from toolkit.launch.events import BEAT, Event
from toolkit.launch.spec import Host, JobSpec

_TICK = 0.05  # Seconds between two looks at signals, and at agents that have no connection yet.
_AGAIN = 3.0  # Seconds between two calls to a host that doesn't answer.
_PATIENCE = 5.0  # Seconds that hosts get to answer before the job goes on without them.
_CALL = 10.0  # Seconds between two calls to a host that was gone when the job went on.


def check_addresses(addresses: Mapping[Host, str], *, open_network: bool) -> None:
    """Refuses addresses that mean different machines to different hosts, and public addresses unless they are allowed.

    Raises:
        LaunchError: Some are loopback, others not.
        ClusterError: One is public.
    """
    local = [host for host in addresses if is_loopback(addresses[host])]
    if local and len(local) < len(addresses):
        raise LaunchError(
            asked=f"the tasks on {local[0].name} and on the other hosts are to reach one another",
            found=f"{addresses[local[0]]} means another machine there",
            remedy="Name this machine by an address that the others can reach",
        )
    if not open_network:
        named = [join(host, 1 + number) for number, host in enumerate(addresses.values())]
        cluster.refuse_public(Cluster({"worker": named}))


def assign(
    counts: Sequence[tuple[str, int]],
    hosts: Sequence[Host],
    addresses: Mapping[Host, str],
    ports: Mapping[Host, Sequence[int]] | None = None,
) -> tuple[Cluster, dict[Task, Host]]:
    """Returns the cluster of these hosts, and each task's host.

    Args:
        counts: How many tasks of each job; workers are renumbered where hosts are gone.
        hosts: All hosts, in their order.
        addresses: The address of each.
        ports: The hosts that are there, each with a port for each of its tasks; None for all hosts and any ports.
    """
    if ports is None:
        numbers = itertools.count(1)
        ports = {host: [next(numbers) for _ in range(host.tasks)] for host in hosts}
    every = [(host, join(addresses[host], port)) for host in hosts if host in ports for port in ports[host]]
    jobs = counts if sum(number for _, number in counts) == len(every) else (("worker", len(every)),)
    names = cluster.numbered(jobs)
    made = Cluster.at({task: address for task, (_, address) in zip(names, every, strict=True)})
    return made, {task: host for task, (host, _) in zip(names, every, strict=True)}


class Backend:
    """Where a job's tasks run.

    Attributes:
        spec: What was asked.
        hosts: The machines, the first one's first task the chief.
        addresses: At which the tasks of each host reach one another.
        remedy: What must be so for a host's agent to start, a sentence with {host} in it.
    """

    spec: JobSpec
    hosts: tuple[Host, ...]
    addresses: dict[Host, str]
    remedy: str

    def call(self, host: Host) -> ConnectedAgent:
        """Returns a new agent for this host, after asking it to prepare."""
        raise NotImplementedError

    def cluster(self, ports: Mapping[Host, Sequence[int]]) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster of the hosts that answered, and the host of each task to start.

        Args:
            ports: The hosts that are there, each with a port for each of its tasks.
        """
        return assign(self.spec.counts, self.hosts, self.addresses, ports)

    def out(self, error: ToolkitError) -> str:  # noqa: ARG002 - it is a queue's that looks at it.
        """Returns why this error means that the job must be queued again; "" if it can stay here."""
        return ""

    def close(self, ended: BaseException | None) -> None:
        """Releases what the place holds, after the job has ended with this error or without one."""


class _Call:
    """An agent that was called, and its answers so far."""

    def __init__(self, agent: ConnectedAgent) -> None:
        self.agent = agent
        self.ready: Event | None = None
        self.refused: Event | None = None

    def read(self) -> None:
        for event in self.agent.read():
            if event["event"] == "ready":
                self.ready = event
                self.agent.scratch = event.get("scratch", "")
            elif event["event"] in ("refused", "over"):
                self.refused = event
        if self.agent.gone and self.ready is None and self.refused is None:
            self.refused = {"asked": "", "found": self.agent.last_line(), "remedy": ""}


class Agents:
    """The agents of a job, over all its attempts.

    Args:
        spec: What was asked.
        backend: Where it is to run.
        received: Signals to the launcher are appended to it.

    Attributes:
        missing: Hosts that the attempt goes on without.
    """

    def __init__(self, spec: JobSpec, backend: Backend, received: Sequence[int]) -> None:
        self._spec = spec
        self._backend = backend
        self._received = received
        self._calls: dict[Host, _Call] = {}
        self._shared = False
        self._called = 0.0
        self.missing: list[Host] = []
        # In its own thread, so that heartbeats go on while the log's disk blocks.
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def connect(self, *, again: bool) -> dict[Host, ConnectedAgent]:
        """Returns a ready agent for each host, in the hosts' order. After a failure, some hosts may be missing.

        Raises:
            LaunchError: One isn't to be had.
            TaskFailed: After a failure, too few answer.
            JobStopped: A signal has come.
        """
        hosts = self._backend.hosts
        for host, call in list(self._calls.items()):
            if call.agent.gone or call.agent.silence > _PATIENCE:
                self._calls.pop(host).agent.close()
        if again:
            self._connect_again()
        else:
            self._connect_all(hosts[:1])
            self._connect_all(hosts)
            self._shared = all(call.ready and call.ready["shared"] for call in self._calls.values())
        self._check_versions()
        self.missing = [host for host in hosts if host not in self._calls]
        self._called = time.monotonic()
        return {host: self._calls[host].agent for host in hosts if host in self._calls}

    def cluster(self) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster of the hosts that answered, and the host of each task to start."""
        ports = {h: self._calls[h].ready["ports"] for h in self._backend.hosts if h in self._calls}  # type: ignore[index]
        return self._backend.cluster(ports)

    def wait(self, seconds: float) -> None:
        """Waits, and meanwhile sends heartbeats to the agents.

        Raises:
            JobStopped: A signal has come.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._look()
            if time.monotonic() >= deadline:
                return
            time.sleep(_TICK)

    def back(self) -> str:
        """Calls missing hosts from time to time; returns the name of one that answers, or ""."""
        for host in self.missing:
            call = self._calls.get(host)
            if call is None:
                continue
            call.read()
            if call.ready is not None:
                return host.name
            if call.refused or call.agent.gone:
                self._calls.pop(host).agent.close()
        if self.missing and time.monotonic() - self._called > _CALL:
            self._called = time.monotonic()
            for host in self.missing:
                if host not in self._calls:
                    self._calls[host] = _Call(self._backend.call(host))
        return ""

    def close(self, ended: BaseException | None) -> None:
        """Ends all agents, after the job has ended with this error or without one."""
        self._over.set()
        self._backend.close(ended)
        for call in list(self._calls.values()):
            call.agent.close()

    def _beat(self) -> None:
        """Sends heartbeats to every agent until the job is over."""
        while not self._over.wait(BEAT):
            for call in list(self._calls.values()):
                if call.ready:
                    call.agent.send("beat")

    def _connect_all(self, hosts: Sequence[Host]) -> None:
        """Calls all hosts and returns when all are ready; an error if one can't be reached."""
        for host in hosts:
            if host not in self._calls:
                self._calls[host] = _Call(self._backend.call(host))
        began = time.monotonic()
        while not all(self._calls[host].ready for host in hosts):
            self._look()
            for host in hosts:
                if refused := self._calls[host].refused:
                    raise self._refusal(host, refused)
                if not self._calls[host].ready and time.monotonic() - began > self._spec.start_timeout:
                    raise LaunchError(
                        asked=f"{host.name} is to run {host.tasks} of the tasks",
                        found=f"it hasn't answered for {self._spec.start_timeout:.0f} s",
                        remedy="See whether it can be reached and Python starts there",
                    )

    def _refusal(self, host: Host, refused: Event) -> ToolkitError:
        if refused.get("event") == "over":
            return TaskFailed(f"{host.name} has left the job: {refused['text']}", code=1)
        if refused["asked"]:
            return LaunchError(asked=refused["asked"], found=refused["found"], remedy=refused["remedy"])
        return LaunchError(
            asked=f"{host.name} is to run {host.tasks} of the tasks",
            found=f"no agent started there ({refused['found'].rstrip('.')})",
            remedy=self._backend.remedy.format(host=host.name),
        )

    def _connect_again(self) -> None:
        """Calls all hosts until all answer, or until enough do; the others are left out."""
        hosts, started = self._backend.hosts, time.monotonic()
        due = dict.fromkeys(hosts, started)
        while True:
            now = time.monotonic()
            for host in hosts:
                if host in self._calls and self._calls[host].refused:
                    self._calls.pop(host).agent.close()
                    due[host] = now + _AGAIN
                if host not in self._calls and due[host] <= now:
                    self._calls[host] = _Call(self._backend.call(host))
            self._look()
            ready = [host for host in hosts if host in self._calls and self._calls[host].ready]
            waited = now - started
            if len(ready) == len(hosts) or (waited > _PATIENCE and self._enough(ready)):
                break
            if waited > self._spec.start_timeout:
                gone = ", ".join(host.name for host in hosts if host not in ready)
                raise TaskFailed(f"{gone} didn't answer for {waited:.0f} s; the last checkpoint is kept.", code=1)
            if all(call.ready for call in self._calls.values()):  # Otherwise `_look` has waited.
                time.sleep(_TICK)
        for host in list(self._calls):
            if host not in ready:
                self._calls.pop(host).agent.close()

    def _enough(self, ready: Sequence[Host]) -> bool:
        """Returns whether the job can go on with these hosts. Without the first host, all must see its directory."""
        few = self._spec.min_workers
        return bool(few) and sum(h.tasks for h in ready) >= few and (self._shared or self._backend.hosts[0] in ready)

    def _look(self) -> None:
        """Takes what agents have answered; waits a moment while one hasn't."""
        waited_for = [call.agent for call in self._calls.values() if not call.ready]
        if waited_for:
            with selectors.DefaultSelector() as selector:
                for agent in waited_for:
                    if agent.fileno() >= 0:
                        selector.register(agent, selectors.EVENT_READ)
                selector.select(_TICK)
        for call in self._calls.values():
            call.read()
        if self._received:
            raise JobStopped(self._received[0])

    def _check_versions(self) -> None:
        for host, call in self._calls.items():
            theirs = call.ready["version"] if call.ready else ""
            if theirs != __version__:
                raise LaunchError(
                    asked=f"{host.name} is to run {host.tasks} of the tasks",
                    found=f"it has version {theirs} of this toolkit, and this machine {__version__}",
                    remedy="Install the same version on every host",
                )
