"""Grid Engine, as Sun, Son of, Univa and Altair have it: qsub, qrsh, qstat, qacct and qdel.

It counts slots, not nodes: a parallel environment, whose name a site chooses, says how a job's slots fall on hosts. One
host is the master's, which runs the batch script. Programs on the others start by `qrsh -inherit`, which the parallel
environment must allow (control_slaves TRUE).
"""

import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import LaunchError
from toolkit.launch.checks import UNLIMITED, require, seconds, single_lines
from toolkit.launch.queues import Queue

# Options of qsub that the launcher sets itself.
_SET_BY_LAUNCHER = ("N", "S", "V", "b", "cwd", "e", "j", "notify", "o", "r", "sync", "t", "terse")
# qstat's letters, of which a state has one or more, such as "Rr", "hqw" or "dr"; the first of these says what counts.
_STATES = (
    *(("d", "ENDING"), ("E", "ERROR"), ("h", "HELD"), ("qw", "PENDING"), ("sSTP", "SUSPENDED"), ("rtR", "RUNNING")),
    ("".join(map(chr, range(128))), "UNKNOWN"),
)
# Every process of a job is told, also those on other hosts; only the supervisor decides what follows.
_DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "agent")


class GridEngine(Queue):
    """Grid Engine.

    Told `-notify`, it sends SIGUSR1 some seconds before it suspends a job, and SIGUSR2 before it ends one: after
    `qdel`, and at the hard time limit. Before that the supervisor looks at the time itself.

    A job of several hosts can't be queued again by the exit code 99: its other hosts then wait for a cleanup that never
    comes (8.1.9). So it is submitted again under its name, which is the job's own, and stands for its number here.
    """

    name = "Grid Engine"
    submits, asks, starts = "qsub", "qstat", "qrsh"
    own = ("pe",)
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    asks_where = None
    alive = ("PENDING", "HELD", "RUNNING", "SUSPENDED", "ERROR", "ENDING", "UNKNOWN")

    def check(self, spec: Any) -> None:
        """Checks that several nodes have a parallel environment, and the options for qsub."""
        named = {text.lstrip("-").partition("=")[0] for text in spec.submit}
        require(
            spec.nodes == 1 or "pe" in named,
            f"--on=sge --nodes={spec.nodes}",
            "no parallel environment says how the job's slots fall on hosts",
            "Add --pe=NAME; `qconf -spl` lists the site's. Its allocation_rule must be the number of slots of a node",
        )
        for text in spec.submit:
            single_lines(qsub=text)
            name = text.lstrip("-").partition("=")[0]
            require(
                name not in _SET_BY_LAUNCHER,
                f"--qsub={text[:60]}",
                "the launcher sets that one itself, or every task of an array would be this job once more",
                "Leave it out, or use the flag of `toolkit launch --help=sge` for it",
            )

    def directives(self, spec: Any, rooms: Sequence[int]) -> list[str]:
        """Returns lines of #$: a slot for each core."""
        cores = max(1, int(spec.cpus_per_task or 1), spec.gpus_per_task, spec.gpus_per_node // max(rooms))
        slots = max(rooms) * cores * spec.nodes
        wanted = [text.lstrip("-").partition("=")[::2] for text in spec.submit]
        limits = []
        if spec.time is not None and spec.time.upper() not in UNLIMITED:
            limits.append(f"h_rt={seconds(spec.time)}")
        if gpus := spec.gpus_per_node or max(rooms) * spec.gpus_per_task:  # What is asked for counts for each slot.
            limits.append(f"gpu={gpus * spec.nodes / slots:g}")
        settings = [
            ("N", spec.name if spec.name[:1].isalpha() else f"job-{spec.name}"),
            ("q", spec.partition),
            ("P", spec.account),
            ("l", ",".join(limits) or None),
            *((name, f"{value} {slots}" if name == "pe" else value or "") for name, value in wanted),
        ]
        lines = [f"#$ -{name} {value}".rstrip() for name, value in settings if value is not None]
        shell = "/bin/bash" if spec.setup else "/bin/sh"  # Grid Engine starts bash as a login shell.
        return [*lines, f"#$ -S {shell}", "#$ -cwd", "#$ -V", "#$ -j y", "#$ -r y", "#$ -notify"]

    def submission(self, batch: Path, output: Path) -> list[str]:
        """Returns qsub's command line, with a name that no other job has."""
        name = re.findall(r"^#\$ -N (.*)", batch.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)[0]
        return ["qsub", "-N", f"{name}-{batch.parent.name.partition('-')[2]}", "-o", str(output), str(batch)]

    def number_in(self, said: str) -> str:
        """Returns the job's name."""
        return said.partition('("')[2].partition('")')[0]

    def unfit(self, directory: str) -> str:
        """Refuses what separates paths, or stands for something else, in qsub's -o."""
        return "Grid Engine reads : , and $ in a log's name in its own way" if re.search("[:,$]", directory) else ""

    def state(self, job: str) -> tuple[str, int]:
        """Returns a job's state in Slurm's words, and its exit code, which Grid Engine may know some seconds late."""
        listed = _done("qstat", "-xml", "-u", "*")
        if listed.returncode:
            return "UNKNOWN", 0
        jobs = [dict(re.findall(r"<(\w+)>([^<]*)</", each)) for each in listed.stdout.split("<job_list")]
        found = [each for each in jobs if each.get("JB_name") == job]
        if found:
            letters = max(found, key=lambda each: int(each["JB_job_number"]))["state"]
            return next(word for any_of, word in _STATES if set(any_of) & set(letters)), 0
        runs = [
            dict(re.findall(r"^(\w+) +(\S+)", run, re.MULTILINE))
            for run in _done("qacct", "-j", job).stdout.split("====")
        ]
        own = [run for run in runs if run.get("pe_taskid") == "NONE"]  # The batch script's, not those of agents.
        if not own:
            return "FORGOTTEN", 0
        code = int(own[-1].get("exit_status", "0"))
        return ("FAILED" if code or own[-1].get("failed") != "0" else "COMPLETED"), code

    def stop(self, job: str) -> None:
        """Deletes the job: it is told at once, and killed after the seconds that its queue's `notify` gives."""
        _done("qdel", job)

    def own_number(self, environ: Mapping[str, str]) -> str:
        """Returns the name of the job that this process is in."""
        return environ["JOB_NAME"]

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of the job's hosts, of which a job without a parallel environment has one."""
        if "PE_HOSTFILE" not in environ:
            return [socket.gethostname()]
        # A line for each queue that gives slots: "a 4 all.q@a UNDEFINED".
        with open(environ["PE_HOSTFILE"], encoding="utf-8") as file:
            return list(dict.fromkeys(line.split()[0] for line in file if line.strip()))

    def on_node(self, node: str, command: Sequence[str]) -> list[str]:
        """Returns a qrsh; on the master's host nothing, since the job's own slot there may be its only one."""
        deaf = [*_DEAF, *command]
        # qrsh hands its arguments to the user's shell, joined by spaces.
        return deaf if node == self.nodes(os.environ)[0] else ["qrsh", "-inherit", "-V", node, shlex.join(deaf)]

    def nodes_answer(self, environ: Mapping[str, str], within: float) -> bool:
        """Asks one host after the other."""
        try:
            return all(
                subprocess.run(
                    self.on_node(node, ["true"]),
                    capture_output=True,
                    stdin=subprocess.DEVNULL,
                    timeout=within,
                    check=False,
                ).returncode
                == 0
                for node in self.nodes(environ)
            )
        except subprocess.TimeoutExpired:
            return False

    def clock(self, spec: Any) -> float | None:
        """Returns when the job must know that its time is nearly up."""
        if spec.time is None or spec.time.upper() in UNLIMITED:
            return None
        return float(seconds(spec.time) - spec.notice)

    def requeue(self, job: str) -> int:  # noqa: ARG002 - its number at present is in the environment.
        """Submits the job again, which its host must be allowed to do."""
        done = _done("qresub", os.environ["JOB_ID"])
        if done.returncode:
            found = self.refusal(done.stderr or done.stdout)
            raise LaunchError(asked="the job is to be submitted again", found=found, remedy="Allow it: qconf -as HOST")
        return 0


def _done(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


QUEUE = GridEngine()
