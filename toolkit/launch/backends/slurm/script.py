"""The batch script: options that sbatch reads, and one command."""

import shlex
import sys

from toolkit.launch.backends.slurm.request import Request

__all__ = ["script"]


def script(request: Request) -> str:
    """Returns the text of the batch script; what it runs is `toolkit.launch.backends.slurm.batch`."""
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks": request.tasks,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        "gpus-per-task": request.gpus_per_task or None,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "signal": f"TERM@{request.notice}",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    own = [f"--max_restarts={request.max_restarts}", f"--tasks={request.counted}", f"--logs={request.logs.absolute()}"]
    own += [f"--start_timeout={request.start_timeout:g}", f"--heartbeat_timeout={request.heartbeat_timeout:g}"]
    own += ["--as_is"] if request.as_is else []
    command = [sys.executable, "-m", "toolkit.launch.backends.slurm.batch", *own, "--", *request.command]
    return "\n".join(["#!/bin/sh", *lines, "#SBATCH --requeue", f"exec {shlex.join(command)}", ""])
