"""Slurm: sbatch, srun, scontrol and scancel."""

import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.cluster.discovery import expand
from toolkit.errors import LaunchError
from toolkit.launch.checks import require, single_lines
from toolkit.launch.queues import Queue
from toolkit.support.words import counted

# Options of sbatch that the launcher sets itself.
_SET_BY_LAUNCHER = (
    *("nodes", "ntasks", "ntasks-per-node", "signal", "output", "error", "open-mode", "requeue", "no-requeue", "wrap"),
)


class Slurm(Queue):
    """Slurm (https://slurm.schedmd.com/sbatch.html)."""

    name = "Slurm"
    submits, asks, starts = "sbatch", "scontrol", "srun"
    own = (
        *("qos", "constraint", "gres", "mem", "mem-per-cpu", "mem-per-gpu", "exclude", "nodelist", "reservation"),
        *("mail-user", "mail-type", "licenses", "dependency", "begin", "comment", "nice", "hint", "wckey", "clusters"),
    )
    alive = (
        *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT"),
        "UNKNOWN",
    )

    def check(self, spec: Any) -> None:
        """Checks that the options for sbatch aren't among those that the launcher sets."""
        for text in spec.submit:
            single_lines(sbatch=text)
            name = text.removeprefix("--").partition("=")[0]
            require(
                name != "array",
                f"--sbatch={text[:60]}",
                "each element of an array would be this job once more, in the same directory",
                "Launch once for each element",
            )
            require(
                name not in _SET_BY_LAUNCHER,
                f"--sbatch={text[:60]}",
                "the launcher sets that one itself",
                "Use the flag of `toolkit launch --help=slurm` for it",
            )

    def directives(self, spec: Any, rooms: Sequence[int]) -> list[str]:
        """Returns lines of #SBATCH."""
        room = max(rooms)
        gpus, why = spec.gpus_per_node or room * spec.gpus_per_task, []
        cores = room
        if spec.cpus_per_task is not None:
            cores = room * int(spec.cpus_per_task)
        elif gpus:
            share, reason = _cores_for_a_gpu(spec.partition)
            cores = max(room, gpus * share)
            why = [f"# {counted(share, 'core')} for each GPU: {reason}. --cpus_per_task sets the cores of a task."]
        settings = {
            "job-name": spec.name,
            "nodes": spec.nodes,
            "ntasks-per-node": 1,  # One agent, with the node's share of the job for all its tasks.
            "cpus-per-task": cores if cores > 1 else None,
            "gpus-per-node": gpus or None,
            "time": spec.time,
            "partition": spec.partition,
            "account": spec.account,
            "signal": f"B:USR1@{spec.notice}",
            "open-mode": "append",
        }
        lines = [f"#SBATCH --{_quoted(f'{name}={value}')}" for name, value in settings.items() if value is not None]
        lines += [f"#SBATCH --{_quoted(text.removeprefix('--'))}" for text in spec.submit]
        return [*lines, "#SBATCH --requeue", *why]

    def submission(self, batch: Path, output: Path) -> list[str]:
        """Returns sbatch's command line."""
        return ["sbatch", "--parsable", f"--output={str(output).replace('%', '%%')}", str(batch)]

    def unfit(self, directory: str) -> str:
        """Refuses a backslash, for which sbatch has no quotes."""
        return "Slurm reads a backslash in a log's name in its own way" if "\\" in directory else ""

    def refusal(self, said: str) -> str:
        """Returns what sbatch has said."""
        return super().refusal(said).removeprefix("sbatch: error: ")

    def number_in(self, said: str) -> str:
        """Returns the job's number; a cluster's name may follow it."""
        return said.strip().partition(";")[0]

    def state(self, job: str) -> tuple[str, int]:
        """Returns a job's state in Slurm's word, and its exit code."""
        done = _done("scontrol", "show", "job", "-o", job)
        found = re.search(r"\bJobState=(\w+)", done.stdout)
        code = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout)
        if found is None:  # Slurm forgets a job some minutes after its end; its controller may be away for a while.
            return ("FORGOTTEN" if "Invalid job id" in done.stderr else "UNKNOWN", 0)
        number = 0 if code is None else int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
        return found[1], number

    def stop(self, job: str) -> None:
        """Tells the batch script only: `scancel` alone tells every process, which then have KillWait, 30 s, to end."""
        _done("scancel", "--state=PENDING", job)
        _done("scancel", "--batch", "--signal=TERM", job)

    def ask_where(self, job: str) -> None:
        """Sends the batch script the signal."""
        _done("scancel", "--batch", f"--signal={signal.SIGUSR2.name.removeprefix('SIG')}", job)

    def start_now(self, job: str) -> None:
        """Sets the job's time of start; Slurm would wait for two minutes."""
        _done("scontrol", "update", f"JobId={job}", "StartTime=now")

    def own_number(self, environ: Mapping[str, str]) -> str:
        """Returns the number of the job that this process is in."""
        return environ["SLURM_JOB_ID"]

    def nodes(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of the job's nodes."""
        return list(expand(environ["SLURM_JOB_NODELIST"]))

    def on_node(self, node: str, command: Sequence[str]) -> list[str]:
        """Returns an srun. Its step gets all of the job's resources on its node, but for what --exact leaves out."""
        where = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--cpu-bind=none", "--mpi=none"]
        return ["srun", *where, "--unbuffered", *command]

    def nodes_answer(self, environ: Mapping[str, str], within: float) -> bool:
        """Asks all nodes: Slurm itself takes minutes to miss one. Until then its failure looks like a task's."""
        number = environ.get("SLURM_NNODES", "1")
        command = ["srun", "--overlap", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1", "true"]
        try:
            return subprocess.run(command, capture_output=True, timeout=within, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def requeue(self, job: str) -> None:
        """Queues the job again; a signal ends this process."""
        done = _done("scontrol", "requeue", job)
        if done.returncode:
            raise LaunchError(
                asked="the job is to be queued again", found=done.stderr.strip(), remedy="Submit it again"
            )

    def cancelled(self, job: str) -> None:
        """Cancels the job."""
        _done("scancel", job)

    def numbers(self, environ: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, str]:
        """Returns what one srun for all tasks would set. Each agent is its own job step, with rank 0."""
        if "SLURM_PROCID" not in environ:
            return {}
        tasks = ranks["tasks"]
        found = {"PROCID": ranks["task"], "LOCALID": ranks["local"], "NODEID": ranks["node"]}
        found |= {"NTASKS": tasks, "NPROCS": tasks, "NNODES": ranks["nodes"]}
        return {f"SLURM_{name}": str(number) for name, number in found.items()}


def _cores_for_a_gpu(partition: str | None) -> tuple[int, str]:
    """Returns how many cores a job should ask for with each GPU, and why: what the site says, or its nodes' share.

    One core for each GPU, which is all that Slurm would give, can't read input as fast as a GPU trains.

    Args:
        partition: That which the job is submitted to; None for the site's default.
    """
    try:
        said = _done("scontrol", "show", "partition", "-o", *([partition] if partition else [])).stdout
    except OSError:
        return 1, "there is no scontrol here that would say how many cores a node has"
    # Without a name, scontrol shows all.
    lines = [line for line in said.splitlines() if line.startswith("PartitionName=")]
    shown = [line for line in lines if partition or re.search(r"\bDefault=YES\b", line)]
    if not shown:
        return 1, f"scontrol shows no partition {partition or 'that is the default'}"
    name = found[1] if (found := re.search(r"\bPartitionName=(\S+)", shown[0])) else partition
    if found := re.search(r"\bDefCpuPerGPU=(\d+)", shown[0]):
        return max(1, int(found[1])), f"the partition {name} sets that"
    amounts = dict(re.findall(r"(?<![\w/])(cpu|gres/gpu)=(\d+)", shown[0]))
    cores, gpus = int(amounts.get("cpu", 0)), int(amounts.get("gres/gpu", 0))
    if not gpus:
        return 1, f"scontrol counts no GPUs in the partition {name}"
    return max(1, cores // gpus), f"the partition {name} has {counted(cores, 'core')} and {counted(gpus, 'GPU')}"


def _quoted(option: str) -> str:
    """Quotes an option of sbatch: it splits a line into words as a shell does."""
    name, equals, value = option.partition("=")
    return f"{shlex.quote(name)}{equals}{shlex.quote(value) if value else ''}"


def _done(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


QUEUE = Slurm()
