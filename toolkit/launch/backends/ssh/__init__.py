"""One job on several hosts by ssh: each host's tasks are started by a launcher there, and watched from here.

hosts       host names and how many tasks each gets
request     what the job is to be, checked
wire        messages between the two ends, a line of JSON each
agent       what runs on each host: it starts that host's tasks, and ends them when this end is gone
connection  the ssh process of one host
copying     the working directory, copied to each host
places      which task goes to which host
part        the tasks of one host, as they are seen from here
attempt     one start of the job, from the first task's start to the last one's end
start       connecting, starting, starting again, with fewer hosts or with one that is back
"""

from toolkit.launch.backends.ssh.hosts import Host, parse
from toolkit.launch.backends.ssh.request import Request
from toolkit.launch.backends.ssh.start import dry_run, start

__all__ = ["Host", "Request", "dry_run", "parse", "start"]
