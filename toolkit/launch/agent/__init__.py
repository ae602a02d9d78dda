"""What starts, signals and watches the tasks of one machine, and tells what happens.

Come here for how a task is started on its machine, and for what becomes of its processes.

channel    events to and fro over pipes or a socket
activity   whether a task that says nothing computes
guard      a program of its own that ends what a killed agent leaves behind
ports      ports that stay this job's from their choice to its end, and to whom they are open
tasks      a task as it will be started: its command and its environment
process    a task's process, and its process group
reports    what tasks report to their agent
sharing    whether hosts see the same directory
isolation  a network namespace for the tasks of this machine
agent      the agent, as an object
program    the agent as a program, at the end of a connection
"""
