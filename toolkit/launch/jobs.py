"""The list of jobs that this user has started, on any terminal: finds, checks and stops them.

Each leaves a small file under ~/.local/state/toolkit/jobs ($XDG_STATE_HOME, where that is set) that names its directory
and the process that supervises it. A process's number is used again after its end, and after a reboot: so
the file has its start and the boot's id, too.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import socket
import time
from typing import Any

import psutil

from toolkit.errors import LaunchError
from toolkit.launch import queues
from toolkit.launch.record import PREFIX, Record
from toolkit.support import files

_BOOT, _MACHINE = pathlib.Path("/proc/sys/kernel/random/boot_id"), pathlib.Path("/etc/machine-id")
_LOG = logging.getLogger(__name__)
_KEPT = 50  # How many jobs before the newest stay in the list though they are over.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The entry of a job in the list of jobs.

    Attributes:
        id: Its id.
        directory: Its own.
        host: The machine that its supervisor was started on.
        pid: The supervisor's process id; 0 where a queue has it.
        started: When that process began, in seconds since 1970.
        boot: The id of the machine's boot.
        machine: The machine's own id: two may have the same name.
        queue_name: The queue's, as `--on` takes it; "" for none.
        number: Its number in its queue; "" for none.
        at: When it was started, in seconds since 1970.
    """

    id: str
    directory: str
    host: str
    pid: int
    started: float
    boot: str
    number: str
    at: float
    machine: str = ""
    queue_name: str = ""

    @property
    def queue(self) -> queues.Queue | None:
        """The queue that has it; None for none."""
        return queues.find(self.queue_name) if self.queue_name in queues.names() else None

    @property
    def record(self) -> Record:
        """The job's files."""
        return Record(pathlib.Path(self.directory))

    @property
    def started_in(self) -> str:
        """The directory that it was started in; "" if its record is gone."""
        with contextlib.suppress(LaunchError):
            return str(self.record.job().get("cwd", ""))
        return ""

    @property
    def near(self) -> bool:
        """Whether this user started it in the present directory."""
        with contextlib.suppress(OSError):
            own = os.stat(self.directory).st_uid == os.geteuid()
            places = (self.started_in, self.directory, os.path.dirname(self.directory))
            return own and os.getcwd() in [os.path.realpath(place) for place in places if place]
        return False

    @property
    def processes(self) -> dict[str, int]:
        """The process id of each of its tasks that runs, on the task's own host."""
        found: dict[str, int] = {}
        for event in self.record.new():
            if event["event"] == "started":
                found[event["task"]] = event["pid"]
            elif event["event"] == "ended":
                found.pop(event["task"], None)
        return found

    @property
    def local(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == socket.gethostname() and self.machine in ("", _read(_MACHINE))

    @property
    def runs(self) -> bool:
        """Whether its supervisor runs on this machine."""
        if not self.local or self.boot != _read(_BOOT) or not self.pid:
            return False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def stopped(self) -> bool:
        """Whether its supervisor is suspended."""
        with contextlib.suppress(psutil.Error):
            return self.runs and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def elsewhere(self) -> bool:
        """Whether only another machine knows its state."""
        return not self.queue.reachable() if self.queue else not self.local

    @property
    def over(self) -> bool:
        """Whether it has certainly ended: its record says so, or its supervisor no longer runs on this machine."""
        if any(event["event"] == "end" for event in self.record.new()):
            return True
        return not self.queue and self.local and not self.runs

    @property
    def alive(self) -> bool:
        """Whether it runs or is queued, as far as this machine can know."""
        return self.state() in {"running", *(word.lower() for word in (self.queue.alive if self.queue else ()))}

    def state(self) -> str:
        """Returns its state in a word or two: "running", "done", "exit code 1", "stopped", "dead", "PENDING" ..."""
        end = next((e for e in reversed(self.record.new()) if e["event"] in ("end", "requeue")), None)
        if end is not None and end["event"] == "end":
            return "done" if not end["code"] else "stopped" if end["stopped"] else f"exit code {end['code']}"
        if self.elsewhere:
            return f"on {self.queue.name if self.queue else self.host}"
        if self.queue:
            word = self.queue.state(self.number)[0]
            return word.lower() if word in self.queue.alive else f"dead ({word.lower()})"
        return "running" if self.runs else "dead"


def add(record: Record, *, pid: int = 0, queue: str = "", number: str = "") -> Entry:
    """Adds a job that is being started, and removes those that are over before the last 50; returns its entry.

    Where the state directory can't be written, the job runs all the same, but `toolkit jobs` won't list it.

    Args:
        record: What it leaves.
        pid: Its supervisor's process id; 0 where a queue has it.
        queue: The queue's name, as `--on` takes it.
        number: Its number there.
    """
    started = 0.0
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid).create_time() if pid else 0.0
    made = Entry(
        id=record.id,
        directory=os.path.abspath(record.directory),
        host=socket.gethostname(),
        pid=pid,
        started=started,
        boot=_read(_BOOT),
        machine=_read(_MACHINE),
        number=number,
        queue_name=queue,
        at=time.time(),
    )
    try:
        files.make_directory(_directory())
        files.write_json(_directory() / f"{record.id}.json", dataclasses.asdict(made))
        for job in [job for job in every()[: -_KEPT - 1] if job.over]:
            (_directory() / f"{job.id}.json").unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning(
            "`toolkit jobs` won't list job %s: %s can't be written (%s). Name it by %s",
            *(record.id, _directory(), error.strerror, made.directory),
        )
    return made


def forget(job: Entry) -> None:
    """Removes a job from the list; its files stay.

    Raises:
        LaunchError: It runs, or may run elsewhere.
    """
    if job.alive or (job.elsewhere and not job.over):
        raise LaunchError(
            asked=f"job {job.id} is to be forgotten",
            found=f"it is {job.state()}",
            remedy="End it with `toolkit stop`, and forget it then",
        )
    (_directory() / f"{job.id}.json").unlink(missing_ok=True)


def present() -> list[Entry]:
    """Returns the known jobs, the newest last, and forgets those that are over and whose directory is gone."""
    known = every()
    for job in [job for job in known if job.over and not os.path.isdir(job.directory)]:
        with contextlib.suppress(OSError):
            forget(job)
        known.remove(job)
    return known


def every() -> list[Entry]:
    """Returns the known jobs, the newest last."""
    found = []
    for path in _directory().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            held = json.loads(path.read_text(encoding="utf-8"))
            if "slurm" in held:  # Of a version that knew one queue only.
                held["number"] = held.pop("slurm")
                held["queue_name"] = "slurm" if held["number"] else ""
            found.append(Entry(**held))
    return sorted(found, key=lambda job: (job.at, job.id))


def find(name: str | None, *, runs: bool = False) -> Entry:
    """Returns the job of this name.

    Args:
        name: Its id or the beginning of it, its directory or the one above, or its number in a queue; None for the
            newest that this user started in the present directory.
        runs: Of several in question, the newest that runs goes before.

    Raises:
        LaunchError: There is none, or more than one.
    """
    known = every()
    if name is None:
        same = [job for job in known if job.near]
        if not same:
            raise LaunchError(
                asked="no id of a job was given",
                found="you have started none in this directory"
                + (f"; the newest, {known[-1].id}, was started in {known[-1].started_in or '?'}" if known else ""),
                remedy="Give the id of a job; `toolkit jobs` lists them",
            )
    else:
        same = [
            job for job in known if name and (name in (job.id, job.number) or os.path.abspath(name) == job.directory)
        ]
        same = same or _in_directory(name)
    matching = [next((job for job in reversed(same) if runs and job.alive), same[-1])] if same else []
    if name and not matching:
        matching = [job for job in known if job.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    asked = f"job {name!r} was asked for"
    if matching:
        ids = ", ".join(job.id for job in matching[:4])
        raise LaunchError(
            asked=asked, found=f"{len(matching)} ids begin with that: {ids}", remedy="Give more of the id"
        )
    raise LaunchError(
        asked=asked, found="no such job is known on this machine", remedy="`toolkit jobs` lists the known ones"
    )


def _in_directory(name: str) -> list[Entry]:
    """Returns the jobs of a directory or below it, the newest last, also those that aren't listed any more."""
    found = []
    folder = pathlib.Path(name)
    for path in [*folder.glob("job.json"), *folder.glob(f"{PREFIX}*/job.json")] if name else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            held = json.loads(path.read_text(encoding="utf-8"))
            where = {"directory": str(path.parent.absolute()), "host": held["host"], "at": held["at"]}
            found.append(Entry(id=held["id"], pid=0, started=0.0, boot="", number="", **where))
    return sorted(found, key=lambda job: job.at)


def command(job: Entry) -> str:
    """Returns a job's command for a shell, without secrets; "" if its record is gone."""
    import shlex

    from toolkit.support import redaction

    try:
        asked = job.record.job()
    except LaunchError:
        return ""
    spec: Any = asked["spec"]
    if asked.get("function"):
        return f"{asked['function']}(...)"
    return shlex.join(redaction.masked_command(spec.command, {**os.environ, **spec.environment}))


def _directory() -> pathlib.Path:
    return files.state_directory() / "jobs"


def _read(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
