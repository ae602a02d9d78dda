"""Starting and watching tasks; the launcher never imports TensorFlow.

A star: a job is described once, one supervisor decides what happens to it, agents do it on each machine, all by events
of one form, and a place is how agents are reached.

events      what happens in a job, in one form: in memory, between machines, and on disk
job         a job, described once
agent       what starts, signals and watches the tasks of one machine
task        what runs inside a task's process, around the user's script
records     what a job leaves on disk, and where its user finds it again
display     what a person sees of a job
supervisor  who decides: attempts, restarts, failures, hangs, signals
backends    where a job can run: this machine, hosts by ssh or at a rendezvous, Slurm, Kubernetes
here        supervising a job in this process
watch       watching a job that something else supervises, and stopping it
detached    a job in a session of its own
start       from a spec to a job at its place, or to what would be done there
functions   a function on its way to the tasks, and its results
launcher    jobs from Python: functions in the place of scripts, and a job as an object
"""

from toolkit.launch.job.options import PLACES
from toolkit.launch.job.spec import JobSpec, options
from toolkit.launch.launcher import Job, Launcher, run, submit
from toolkit.launch.start import dry_run, start

__all__ = ["PLACES", "Job", "JobSpec", "Launcher", "dry_run", "options", "run", "start", "submit"]
