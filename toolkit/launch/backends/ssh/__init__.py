"""One job on several hosts by ssh: each host's tasks are started by a launcher there, and watched from here.

spec        what the job is to be, checked: the hosts, and what runs there
wire        messages between the two ends, a line of JSON each
programs    ssh as the user has configured it, and rsync, which copies the working directory
agent       what runs on each host: it starts that host's tasks, and ends them when this end is gone
connection  the ssh process of one host
assignment  which task runs on which host
host_tasks  the tasks of one host, as the launcher sees them
attempt     one start of the job, from the first task's start to the last one's end
start       connecting, starting, starting again, with fewer hosts or with one that is back
"""

from toolkit.launch.backends.ssh.spec import Host, SshSpec, parse
from toolkit.launch.backends.ssh.start import dry_run, start

__all__ = ["Host", "SshSpec", "dry_run", "parse", "start"]
