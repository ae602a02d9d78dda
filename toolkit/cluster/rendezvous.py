"""How tasks reach one another, and wait for one another before TensorFlow does.

gRPC sends to peers through a web proxy where one is set, and TensorFlow then waits for ever. TensorFlow's servers obey
every program that reaches them, so no task should be at a public address.

TensorFlow waits for a missing peer without a word, holds Python's interpreter lock meanwhile and ignores SIGTERM. So
the tasks have a rendezvous first, at the addresses that TensorFlow will use: each listens on its own, connects to every
other, and sends one line: who it is, and what program it runs, so that tasks can compare theirs. When each has reached
all others, they let go of the ports for TensorFlow.
"""

import dataclasses
import errno
import hashlib
import ipaddress
import json
import logging
import os
import pathlib
import platform
import re
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster.addresses import is_loopback, split
from toolkit.cluster.tf_config import Cluster, Task
from toolkit.errors import ClusterError
from toolkit.support import signals, status
from toolkit.support.strangers import Strangers
from toolkit.support.versions import versions

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # In the order in which gRPC reads them.
_EXCEPT = ("no_grpc_proxy", "no_proxy")


def without_proxies(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns additions to an environment so that gRPC reaches every task directly."""
    proxied = _proxied(cluster, environ)
    return {"no_grpc_proxy": _excepted(environ, proxied)} if proxied else {}


def reach_directly(cluster: Cluster) -> None:
    """Makes this process reach every task without a proxy. gRPC reads the environment whenever it opens a channel."""
    os.environ.update(without_proxies(cluster, os.environ))


def is_public(host: str) -> bool:
    """Returns whether a name or an address belongs to the public internet, by all of the resolver's answers.

    A name that can't be resolved here doesn't count as public.
    """
    try:
        answers = {str(answer[4][0]).partition("%")[0] for answer in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(ipaddress.ip_address(answer).is_global for answer in answers)


def refuse_public(cluster: Cluster) -> None:
    """Checks that no task of the cluster is at a public address.

    Raises:
        ClusterError: One is.
    """
    for task in cluster.tasks:
        host, port = split(cluster.address(task))
        if is_public(host):
            raise ClusterError(
                asked=f"{task} is to listen at {host}, port {port}",
                found="that is a public address, and anyone who reaches TensorFlow's servers can run programs in them",
                remedy="Use the hosts' private addresses; or add --open_network once a firewall admits nobody "
                "but the hosts of the job",
            )


def _proxied(cluster: Cluster, environ: Mapping[str, str]) -> list[str]:
    if not any(environ.get(name) for name in _PROXIES):
        return []
    entries = _entries(environ)
    hosts = dict.fromkeys(split(cluster.address(task))[0] for task in cluster.tasks)
    return [host for host in hosts if not any(_covers(entry, host) for entry in entries)]


def _entries(environ: Mapping[str, str]) -> list[str]:
    listed = next((environ[name] for name in _EXCEPT if environ.get(name)), "")
    return [entry.strip() for entry in listed.split(",") if entry.strip()]


def _excepted(environ: Mapping[str, str], hosts: Iterable[str]) -> str:
    # gRPC reads no_proxy only if there is no no_grpc_proxy, so its exceptions must be repeated.
    return ",".join([*_entries(environ), *hosts])


def _covers(entry: str, host: str) -> bool:
    """Compares as gRPC does: an entry is the end of a name, or a range of addresses."""
    if "/" in entry:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    return host.lower().endswith(entry.lower())


_LOG = logging.getLogger(__name__)

_RETRY = 0.25  # Seconds between two connections to the same peer.
_SAY_AFTER, _SAY_EVERY = 3.0, 5.0  # Seconds.
_LONGEST = 1 << 16  # The most bytes of a greeting.
_NAMED = 4  # The most missing tasks that a message names.
_GRPC = b"\x04"  # An HTTP/2 server begins with a SETTINGS frame; this is its type, in the fourth byte.
_NO_GREETING = (ValueError, KeyError, TypeError, RecursionError)


def wait_for_tasks(
    cluster: Cluster,
    own: Task,
    *,
    timeout: float,
    peers: Iterable[Task] | None = None,
    program: Mapping[str, str] | None = None,
) -> None:
    """Returns when every task of the cluster has reached every other.

    A task that TensorFlow already serves counts as reached: it was started without this toolkit.

    Args:
        cluster: All tasks of the rendezvous.
        own: This process's task.
        timeout: Seconds to wait.
        peers: Which tasks to wait for; None for all others.
        program: What this task runs, as `describe_program` returns it; peers that run something else are refused.

    Raises:
        ClusterError: This task's port is taken, a peer doesn't answer in time, another task or
            another cluster's answers in its place, or another process says that it is this task.
        SystemExit: A signal came that the program doesn't handle itself.
    """
    if len(cluster.tasks) > 1:
        others = [task for task in peers or cluster.tasks if task != own]
        with (
            signals.exiting(f"waiting for {', '.join(str(task) for task in others[:_NAMED])}"),
            _Rendezvous(cluster, own, others, program or {}) as rendezvous,
        ):
            rendezvous.wait(timeout)


class _Rendezvous:
    def __init__(self, cluster: Cluster, own: Task, peers: list[Task], program: Mapping[str, str]) -> None:
        self.program = program
        self.cluster = cluster
        self.own = own
        self.peers = peers
        self.reached: set[Task] = set()  # Tasks that have answered this task's greeting.
        self.reached_by: set[Task] = set()  # Tasks whose greeting this task has answered.
        self.reasons: dict[Task, str] = {}
        self.outgoing: dict[Task, Outgoing] = {}
        self.strangers = Strangers(within=_PATIENCE)
        self.process = secrets.token_hex(8)
        try:
            listeners = listen(cluster.address(own), own)
        except ClusterError:
            # If this task was started twice, the other process finds out by this greeting.
            self._refuse_duplicate(ask(cluster.address(own), self._greeting(own)))
            raise
        self.selector = selectors.DefaultSelector()
        for listener in listeners:
            self.selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Rendezvous":
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()

    def wait(self, timeout: float) -> None:
        started = reported = time.monotonic()
        # If ports are shared, a connection to oneself may reach a duplicate; otherwise the duplicate can't bind the
        # port.
        called = [*self.peers, self.own] if ports_are_shared() else self.peers
        due = dict.fromkeys(called, started)
        while missing := [task for task in self.peers if task not in self.reached or task not in self.reached_by]:
            now = time.monotonic()
            if now - started > timeout:
                raise ClusterError(
                    asked=f"{self.own} waited {timeout:.0f} s for the {len(self.peers)} other tasks of the cluster",
                    found=f"{len(missing)} could not be reached: {self._described(missing)}",
                    remedy="Start every task with the same cluster, check names, ports and firewalls, or wait longer",
                )
            if now - started > _SAY_AFTER and now - reported > _SAY_EVERY:
                reported = now
                _LOG.warning("waiting for %s, %.0f s", self._described(missing), now - started)
                status.report(state=f"waiting for {', '.join(str(task) for task in missing[:_NAMED])}")
            for task in called:
                if task not in self.reached and task not in self.outgoing and due[task] <= now:
                    due[task] = now + _RETRY
                    self._connect(task)
            for task, connection in list(self.outgoing.items()):
                if connection.overdue(now):
                    self._disconnect(task, "no answer")
            for stranger in self.strangers.overdue():
                self._hang_up(stranger)
            for key, _ in self.selector.select(0.05):
                if isinstance(key.data, Outgoing):
                    self._proceed(key.data)
                elif isinstance(key.data, Incoming):
                    self._receive(key.data)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]

    def _greeting(self, to: Task | None) -> bytes:
        facts = {
            "toolkit": __version__,
            "task": str(self.own),
            "to": str(to) if to else None,
            "cluster": self.cluster.digest,
            "program": dict(self.program),
            "process": self.process,
        }
        return json.dumps(facts).encode() + b"\n"

    def _connect(self, task: Task) -> None:
        try:
            connection = Outgoing(task, self.cluster.address(task))
        except OSError as error:
            self.reasons[task] = reason(error)
            return
        self.outgoing[task] = connection
        self.selector.register(connection.socket, selectors.EVENT_WRITE, connection)

    def _disconnect(self, task: Task, reason: str) -> None:
        connection = self.outgoing.pop(task)
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.reasons[task] = reason

    def _proceed(self, connection: "Outgoing") -> None:
        """Sends the greeting over an open connection, or reads the answer."""
        task = connection.task
        try:
            if not connection.greeted:
                error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                connection.socket.send(self._greeting(task))
                connection.greeted = True
                self.selector.modify(connection.socket, selectors.EVENT_READ, connection)
                return
            received = connection.socket.recv(_LONGEST)
        except OSError as error:
            self._disconnect(task, reason(error))
            return
        connection.text += received
        if connection.text[3:4] == _GRPC and connection.text[:1] == b"\0":
            self.reached_by.add(task)  # TensorFlow's own server, which will not connect to us.
            self.reached.add(task)
            self._disconnect(task, "")
        elif b"\n" in connection.text or not received or len(connection.text) > _LONGEST:
            if task == self.own:
                self._refuse_duplicate(connection.text)
            self._disconnect(task, "" if task == self.own else self._check_answer(task, connection.text))

    def _refuse_duplicate(self, text: bytes) -> None:
        """Raises if the greeting is another process's and says that it is this task."""
        try:
            facts = json.loads(text)
            same = facts["task"] == str(self.own) and facts["cluster"] == self.cluster.digest
            duplicate = same and facts["process"] != self.process
        except _NO_GREETING:
            return
        if duplicate:
            raise ClusterError(
                asked=f"this process is to be {self.own}",
                found="another process has the same task",
                remedy="Give each process its own index, and end processes that earlier jobs have left",
            )

    def _check_answer(self, task: Task, text: bytes) -> str:
        """Returns why a peer's answer isn't valid, "" if it is; raises if it belongs to another job."""
        try:
            facts = json.loads(text)
            name, digest = facts["task"], facts["cluster"]
        except _NO_GREETING:
            return "another program answers there"
        address = self.cluster.address(task)
        if digest != self.cluster.digest:
            raise ClusterError(
                asked=f"{self.own} looks for {task} at {address}",
                found=f"{name} of another cluster answers there",
                remedy="Give every task the same cluster, in the same order, and end processes left by earlier jobs",
            )
        if name != str(task):
            raise ClusterError(
                asked=f"{self.own} looks for {task} at {address}",
                found=f"the task there says that it is {name}",
                remedy="Give each process its own index, and each task its own address",
            )
        self._check_program(name, facts.get("program"))
        self.reached.add(task)
        return ""

    def _check_program(self, other: str, theirs: Any) -> None:
        """Compares the programs of two tasks. Both ends do so, and both end with the message."""
        if not isinstance(theirs, dict):
            return
        for key, mine in self.program.items():
            yours = theirs.get(key, mine)
            if yours != mine:
                raise ClusterError(
                    asked=f"{self.own} and {other} are to run the same program",
                    found=f"their {key} differ: {mine or 'none'} here, {str(yours)[:500] or 'none'} there",
                    remedy=remedy(key),
                )

    def _accept(self, listener: socket.socket) -> None:
        accepted = self.strangers.accept(listener)
        if not accepted:  # There are too many, or no descriptors. The listener stays ready, and this would spin.
            time.sleep(_TICK)
        for connection, _ in accepted:
            self.selector.register(connection, selectors.EVENT_READ, Incoming(connection))

    def _hang_up(self, connection: socket.socket) -> None:
        self.strangers.forget(connection)
        self.selector.unregister(connection)
        connection.close()

    def _receive(self, connection: "Incoming") -> None:
        """Reads a greeting, and answers it."""
        known = None
        try:
            received = connection.socket.recv(_LONGEST)
            connection.text += received
            if received and b"\n" not in connection.text and len(connection.text) <= _LONGEST:
                return
            facts = json.loads(connection.text)
            task = Task.parse(str(facts["task"]))
            connection.socket.send(self._greeting(None))
            if facts["cluster"] == self.cluster.digest and facts["to"] == str(self.own) and task in self.peers:
                self.reached_by.add(task)
                known = task
        except (OSError, ClusterError, *_NO_GREETING):
            pass  # A stranger, or a peer that will connect again.
        self._hang_up(connection.socket)
        self._refuse_duplicate(connection.text)
        if known is not None:
            self._check_program(str(known), facts.get("program"))

    def _described(self, missing: list[Task]) -> str:
        """Returns which tasks are missing, where they should be, and why."""
        words = []
        for task in missing[:_NAMED]:
            reason = self.reasons.get(task) or ("it hasn't connected back" if task in self.reached else "no answer yet")
            words.append(f"{task} at {self.cluster.address(task)} ({reason})")
        rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return ", ".join(words) + rest


_TICK = 0.01
_PATIENCE = 5.0  # Seconds in which a peer must answer, or have sent its greeting.
_ASK = 2.0  # Seconds in which a program answers that has this task's port.


class Outgoing:
    """A connection to a peer, perhaps still being made; raises OSError if that fails at once."""

    def __init__(self, task: Task, address: str) -> None:
        host, port = split(address)
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.task = task
        self.greeted = False
        self.text = b""
        self.socket = socket.socket(family, kind, protocol)
        self.socket.setblocking(False)
        self._until = time.monotonic() + _PATIENCE
        code = self.socket.connect_ex(where)
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self.socket.close()
            raise OSError(code, os.strerror(code))

    def overdue(self, now: float) -> bool:
        """Returns whether the peer's time to answer is over, by the monotonic clock."""
        return now > self._until


@dataclasses.dataclass(eq=False)
class Incoming:
    """A connection to this task, and the bytes received over it."""

    socket: socket.socket
    text: bytes = b""


def ask(address: str, greeting: bytes) -> bytes:
    """Returns the line that answers a greeting, or its beginning; b"" if none arrives."""
    answer, until = b"", time.monotonic() + _ASK
    try:
        with socket.create_connection(split(address), timeout=_ASK) as connection:
            connection.sendall(greeting)
            while b"\n" not in answer and len(answer) <= _LONGEST:
                connection.settimeout(max(0.01, until - time.monotonic()))  # In all: it may come letter by letter.
                if not (piece := connection.recv(_LONGEST)):
                    break
                answer += piece
    except OSError:
        return b""
    return answer


def listen(address: str, own: Task) -> list[socket.socket]:
    """Returns sockets that listen on this task's port, by IPv4 and, if the machine has it, IPv6.

    Raises:
        ClusterError: The port can't be had.
    """
    host, port = split(address)
    # TensorFlow will listen on all interfaces, but for a local job that isn't needed now.
    interfaces = ("127.0.0.1", "::1") if is_loopback(host) else ("0.0.0.0", "::")
    listeners: list[socket.socket] = []
    for family, interface in zip((socket.AF_INET, socket.AF_INET6), interfaces, strict=True):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # No IPv6 on this machine.
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ports_are_shared():
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((interface, port))
            listener.listen(min(4096, socket.SOMAXCONN))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if family == socket.AF_INET6:
                continue
            raise ClusterError(  # IPv4 comes first: nothing else is open yet.
                asked=f"the cluster says that {own} listens on port {port}",
                found=f"this process can't open that port ({error.strerror})",
                remedy=f"End the program that listens on port {port} (ss -ltnp names it), or choose another port",
            ) from error
        listeners.append(listener)
    return listeners


def ports_are_shared() -> bool:
    """Returns whether a launcher reserves the ports for its tasks, so that several processes may bind the same one."""
    return bool(os.environ.get("TF_GRPC_REUSE_PORT"))


def reason(error: OSError) -> str:
    """Returns in words why a connection failed."""
    if isinstance(error, socket.gaierror):
        return "its name has no address"
    return (error.strerror or str(error)).lower()


# They name the task, or a place on its host, and may differ.
_OWN = {"cluster", "data_dir", "gpus", "host", "index", "job", "job_name", "log_dir", "port", "rank", "run_dir"}
_OWN |= {"task", "task_id", "task_index", "task_type", "type", "visible_devices", "worker_id"}
# Versions are compared, not the names of distributions.
_PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras"}
_JOBS, _VERSIONS = "jobs", " versions"


def describe_program(script: str | None, arguments: Sequence[str] | None, *, job: str | None = None) -> dict[str, str]:
    """Returns what all tasks must share: words that complete "their ... differ" -> this task's value.

    Args:
        script: Path of the program; None where there is none, as in an interactive session.
        arguments: The command line without the program; None where tasks may have flags, and a
            text of the script, of their own: many a worker's script has its index written in it.
        job: What all tasks of this job share and no other job's do; None where that isn't known.
    """
    described = _versions()
    if job is not None:
        described[_JOBS] = job
    if script is not None:
        # Some tutorials have a script for each worker, with the worker's index in its name.
        described["scripts' names"] = re.sub(r"\d+", "", pathlib.Path(script).name)
    if arguments is not None:
        described["flags"] = json.dumps(sorted(_shared(arguments)))[1:-1]
        try:
            if script is not None:
                described["scripts"] = hashlib.sha256(pathlib.Path(script).read_bytes()).hexdigest()[:12]
        except OSError:
            pass
    return described


def remedy(differing: str) -> str:
    """Returns the remedy for a difference, named by its key in `describe_program`."""
    if differing == _JOBS:
        return "End what is left of earlier jobs"
    if differing.endswith(_VERSIONS):
        return "Install the same versions for every task"
    return "Start every task with the same script and flags"


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "toolkit": __version__}
    # The part after a + names the builder.
    found |= {_PACKAGES[name]: each.partition("+")[0] for name, each in versions(_PACKAGES).items()}
    return {f"{name}{_VERSIONS}": version for name, version in found.items()}


def _shared(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        name, given, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            skip = name in _OWN and not given  # A flag whose value follows.
            if name not in _OWN:
                kept.append(argument)
        elif not skip:
            kept.append(argument)
        else:
            skip = False
    return kept
