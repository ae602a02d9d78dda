"""Starting and watching tasks; the launcher never imports TensorFlow.

Come here for what becomes of a job: how its tasks are started, shown, ended and started again, and what is written of
it. Where it runs (Slurm, hosts by ssh, Kubernetes) is a folder of `backends`.

spec       what a launch is to do, checked
isolation  a network namespace for the tasks of this machine
guard      a program of its own that ends what a killed launcher leaves behind
ports      ports that stay this job's from their choice to its end, and to whom they are open
patching   TensorFlow's names for its strategies, given to ours in the user's script
record     what a job leaves: logs, what became of the tasks, the first failure
child      what runs in each task before the user's script
masking    secrets of the environment, taken out of a stream of bytes
output     a task's output: into its log, and as whole lines to whoever watches
stacks     where tasks are that make no progress, by their Python stacks
tasks      which tasks to start here, each with its command and environment
budget     how often what has failed is started again
activity   whether a task that says nothing computes
running    a task that has been started
failure    which failure is the cause of the others, and the message about it
reports    what tasks report to their launcher
display    the tasks' lines, and a table on a terminal
job        starting the tasks, watching them, ending all with the first that fails
start      from a spec to a job that runs
backends   the places where a job can run: Slurm, hosts by ssh, Kubernetes
"""

from toolkit.launch.budget import Budget, attempts
from toolkit.launch.display import Display
from toolkit.launch.isolation import MODES, enter, wanted_out
from toolkit.launch.record import Record, log_directory
from toolkit.launch.spec import JobOptions, LaunchSpec, check_command, check_passable, check_times, counted, new_job_id
from toolkit.launch.start import dry_run, start

__all__ = [
    "MODES",
    "Budget",
    "Display",
    "JobOptions",
    "LaunchSpec",
    "Record",
    "attempts",
    "check_command",
    "check_passable",
    "check_times",
    "counted",
    "dry_run",
    "enter",
    "log_directory",
    "new_job_id",
    "start",
    "wanted_out",
]
