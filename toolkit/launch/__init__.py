"""Starts and watches tasks. The launcher never imports TensorFlow.

A star: a job is described once, one supervisor decides what happens to it, agents do it on each machine, all by events
of one form, and a backend is how agents are reached.

events      what happens in a job, in one form: in memory, between machines, and on disk
checks      the rules that a job's values follow, each with its sentence
spec        a job, described once: what runs, how often, on which machines and how
site        what a site or a project always asks for, from toolkit.toml
record      a job's files: logs, what was asked for, what happened, the first failure
queues      where a job can be submitted to, one file each: how, and what the queue says to it
jobs        the list of jobs that this user has started
display     what a person sees of a job: lines, messages, a table
follow      the same, of a job that another process supervises
agent       what starts, signals and watches the tasks of one machine
nccl        what NCCL itself says of its ranks
task        what runs inside a task's process, around the user's script
supervisor  who decides: attempts, restarts, failures, hangs, signals
backends    where a job can run: this machine, hosts by ssh or at a rendezvous, a queue, Kubernetes
functions   a function in place of a script: sent, called in each task, its results
job         a job that was started: found again, watched, asked and ended
starting    from a spec to a job that runs: in this process, detached, or only described
launcher    jobs from Python: functions in the place of scripts
"""

import lazy_loader

__all__ = [
    "PLACES",
    "Failure",
    "Job",
    "JobSpec",
    "Launcher",
    "dry_run",
    "options",
    "run",
    "start",
    "submit",
]

# Every agent and every task imports this package at its start and needs none of these.
__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "launcher": ["Launcher", "run", "submit"],
        "record": ["Failure"],
        "spec": ["PLACES", "JobSpec", "options"],
        "job": ["Job"],
        "starting": ["dry_run", "start"],
    },
)
