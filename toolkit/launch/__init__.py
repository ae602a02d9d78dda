"""Starting and watching tasks; the launcher never imports TensorFlow.

request   what a launch is to do, checked
isolation  a network namespace for the tasks of this machine
guard     a program of its own that ends what a killed launcher leaves behind
guarding  the launcher's side of it
ports     ports that stay this job's from their choice to its end
adoption  TensorFlow's name for its strategy, given to ours in the user's script
child     what runs in each task before the user's script
masking   secrets of the environment, taken out of a stream that comes in pieces
output    a task's output: into its log, and as whole lines to whoever watches
stacks    where tasks stand that make no progress
tasks     a task as it will be started: command and environment
budget    how often what has failed is started again
running   a task that has been started
listening  what the tasks' servers are open to
failure   which failure is the cause of the others, and the message about it
logs      the directory that the tasks' logs are in
record    what became of the tasks, when
display   the tasks' lines, and a table on a terminal
job       starting the tasks, watching them, ending all with the first that fails
start     from a request to a job that runs
backends  the places where a job can run: Slurm, hosts by ssh, Kubernetes
"""

from toolkit.launch.budget import Budget
from toolkit.launch.display import Display
from toolkit.launch.isolation import MODES, enter, wanted_out
from toolkit.launch.logs import log_directory
from toolkit.launch.record import Record
from toolkit.launch.request import Request, check_times, counted
from toolkit.launch.start import dry_run, start

__all__ = [
    "MODES",
    "Budget",
    "Display",
    "Record",
    "Request",
    "check_times",
    "counted",
    "dry_run",
    "enter",
    "log_directory",
    "start",
    "wanted_out",
]
