"""Starts and watches tasks. The launcher never imports TensorFlow.

A star: a job is described once, one supervisor decides what happens to it, agents do it on each machine, all by events
of one form, and a place is how agents are reached.

alone       a module run as a program, whatever is beside the user's script
events      what happens in a job, in one form: in memory, between machines, and on disk
job         a job, described once
agent       what starts, signals and watches the tasks of one machine
task        what runs inside a task's process, around the user's script
records     what a job leaves on disk, and where its user finds it again
display     what a person sees of a job
supervisor  who decides: attempts, restarts, failures, hangs, signals
backends    where a job can run: this machine, hosts by ssh or at a rendezvous, Slurm, Kubernetes
here        supervising a job in this process
functions   a function on its way to the tasks, and its results
started     a job that was started: found again, watched, asked and ended
detached    a job in its own session
starting    from a spec to a job at its place, or to what would be done there
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
        "job.options": ["PLACES"],
        "job.spec": ["JobSpec", "options"],
        "launcher": ["Launcher", "run", "submit"],
        "records.record": ["Failure"],
        "started": ["Job"],
        "starting": ["dry_run", "start"],
    },
)
