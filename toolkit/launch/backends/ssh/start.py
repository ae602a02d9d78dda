"""Connecting, starting, starting again: with fewer hosts where some are gone, and with one that is back."""

import pathlib
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence

from toolkit import __version__
from toolkit.cluster.addresses import is_loopback
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import Budget, Display, Record, attempts, log_directory, new_job_id
from toolkit.launch.backends.ssh.assignment import assign, check_addresses
from toolkit.launch.backends.ssh.attempt import Attempt
from toolkit.launch.backends.ssh.connection import Connection
from toolkit.launch.backends.ssh.host_tasks import HostTasks
from toolkit.launch.backends.ssh.programs import address_of, copy
from toolkit.launch.backends.ssh.spec import Host, SshSpec
from toolkit.support import signals

__all__ = ["dry_run", "start"]

_AGAIN = 3.0  # Seconds between two calls to a host that doesn't answer.
_PATIENCE = 5.0  # Seconds that hosts get to answer before the job goes on without them.


def start(spec: SshSpec) -> None:
    """Starts the tasks on all hosts, shows what they do, and returns when all are done.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed, or a host is gone.
        JobStopped: This program received a signal to stop.
    """
    with signals.recorded() as received:
        addresses = {host: address_of(spec, host) for host in spec.hosts}
        check_addresses(spec, addresses)
        _, tasks = assign(spec, addresses)
        every = [task for host in spec.hosts for task in tasks[host]]
        logs = log_directory(spec.log_dir, [str(task).replace(":", "-") for task in every])
        copy(spec)
        display = Display(every, tee=spec.tee, only=spec.only)
        try:
            _Launch(spec, addresses, logs, display, received).run()
        finally:
            display.close()


def dry_run(spec: SshSpec) -> list[str]:
    """Returns for each host its tasks and the command that would start its agent; calls nobody."""
    addresses = {host: address_of(spec, host) for host in spec.hosts}
    check_addresses(spec, addresses)
    _, tasks = assign(spec, addresses)
    shown = shlex.join((spec.python, *spec.command))
    return [
        f"# {host.name}, {addresses[host]}, in {spec.directory}: {', '.join(map(str, tasks[host]))}: {shown}"
        for host in spec.hosts
    ]


class _Launch:
    def __init__(
        self,
        spec: SshSpec,
        addresses: Mapping[Host, str],
        logs: pathlib.Path,
        display: Display,
        received: list[int],
    ) -> None:
        self.spec = spec
        self.addresses = addresses
        self.logs = logs
        self.display = display
        self.received = received
        self.token = secrets.token_hex(8)
        self.job_id = new_job_id()
        self.shared = False

    def run(self) -> None:
        budget = Budget(self.spec.max_restarts, window=self.spec.restart_window)
        attempts(self._attempt, budget=budget, say=self.display.say, received=self.received)

    def _attempt(self, number: int) -> bool:
        connections = self._connect(again=number > 1)
        ports = {host: c.ready["ports"] for host, c in connections.items() if c.ready}
        cluster, tasks = assign(self.spec, self.addresses, ports)
        missing = [host for host in self.spec.hosts if host not in connections]
        without = f", without {', '.join(host.name for host in missing)}" if missing else ""
        self.display.say(f"launch: {len(cluster.tasks)} tasks on {len(ports)} hosts{without}; logs in {self.logs}")
        if number == 1 and not all(is_loopback(address) for address in self.addresses.values()):
            self._name_ports()
        record = Record(self.logs)
        hosts = [
            HostTasks(connection, tasks[host], logs=self.logs, record=record, display=self.display)
            for host, connection in connections.items()
        ]
        return Attempt(
            self.spec,
            hosts,
            cluster,
            missing,
            token=self.token,
            job_id=self.job_id,
            number=number,
            display=self.display,
            received=self.received,
        ).run()

    def _name_ports(self) -> None:
        names = ", ".join(host.name for host in self.spec.hosts[:8])
        self.display.say(
            "note: TensorFlow's ports, which the system chooses (see net.ipv4.ip_local_port_range), take orders from "
            f"whoever reaches them: a firewall should let in nobody but these hosts ({names})"
        )

    def _connect(self, *, again: bool) -> dict[Host, Connection]:
        """Returns a ready agent for each host, the first host's first; after a failure those that answer suffice."""
        hosts = self.spec.hosts
        calls: dict[Host, Connection] = {}
        try:
            if not again:
                self._ready(calls, hosts[:1])
                self._ready(calls, hosts)
                self.shared = all(call.ready and call.ready["shared"] for call in calls.values())
            else:
                self._ready_again(calls)
        except BaseException:
            for call in calls.values():
                call.close()
            raise
        return {host: calls[host] for host in hosts if host in calls}

    def _call(self, calls: dict[Host, Connection], host: Host) -> None:
        first = host == self.spec.hosts[0]
        calls[host] = Connection(self.spec, host, token=self.token, first=first)

    def _ready(self, calls: dict[Host, Connection], hosts: Sequence[Host]) -> None:
        """Calls them, and returns when all are ready; the first one that isn't to be had is an error."""
        for host in hosts:
            if host not in calls:
                self._call(calls, host)
        while not all(calls[host].ready for host in hosts):
            self._look(calls)
            for host in hosts:
                if calls[host].refused:
                    raise LaunchError(
                        asked=f"{host.name} is to run {host.tasks} of the tasks",
                        found=f"its answer is: {calls[host].refused.rstrip('.')}",
                        remedy=f"This must work without a question: ssh {host.name} "
                        f"{shlex.quote(self.spec.python)} -c 'import toolkit'; "
                        "and the directory must be there, or --copy_to name one",
                    )
                if calls[host].silence > self.spec.start_timeout:
                    raise LaunchError(
                        asked=f"{host.name} is to run {host.tasks} of the tasks",
                        found=f"it hasn't answered for {self.spec.start_timeout:.0f} s",
                        remedy="See whether ssh reaches it and Python starts there",
                    )
        self._check_versions(calls)

    def _ready_again(self, calls: dict[Host, Connection]) -> None:
        """Calls all hosts until they answer, or until enough do; those that don't are left out."""
        hosts, started = self.spec.hosts, time.monotonic()
        due = dict.fromkeys(hosts, started)
        while True:
            now = time.monotonic()
            for host in hosts:
                if host in calls and calls[host].refused:
                    calls.pop(host).close()
                    due[host] = now + _AGAIN
                if host not in calls and due[host] <= now:
                    self._call(calls, host)
            self._look(calls)
            ready = [host for host in hosts if host in calls and calls[host].ready]
            waited = now - started
            if len(ready) == len(hosts) or (waited > _PATIENCE and self._enough(ready)):
                break
            if waited > self.spec.start_timeout:
                gone = ", ".join(host.name for host in hosts if host not in ready)
                raise TaskFailed(f"{gone} didn't answer for {waited:.0f} s; the last checkpoint is kept.", code=1)
        for host in list(calls):
            if host not in ready:
                calls.pop(host).close()
        self._check_versions(calls)

    def _enough(self, ready: Sequence[Host]) -> bool:
        """Returns whether the job can go on with these: without the first host only where all see its directory."""
        few = self.spec.min_workers
        return bool(few) and sum(h.tasks for h in ready) >= few and (self.shared or self.spec.hosts[0] in ready)

    def _look(self, calls: Mapping[Host, Connection]) -> None:
        time.sleep(0.02)
        if self.received:
            raise JobStopped(self.received[0])
        for call in calls.values():
            call.read()
            if call.ready:
                call.beat()

    def _check_versions(self, calls: Mapping[Host, Connection]) -> None:
        for host, call in calls.items():
            theirs = call.ready["version"] if call.ready else ""
            if theirs != __version__:
                raise LaunchError(
                    asked=f"{host.name} is to run {host.tasks} of the tasks",
                    found=f"it has version {theirs} of this toolkit, and this machine {__version__}",
                    remedy="Install the same version on every host",
                )
