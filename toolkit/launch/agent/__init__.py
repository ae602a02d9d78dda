"""Starts, signals and watches the tasks of one machine, and reports events.

Come here for how a task is started on its machine, and for what becomes of its processes.

channel      events to and fro over pipes or a socket
activity     whether a task that says nothing computes
ports        ports that stay this job's from their choice to its end, and to whom they are open
tasks        a task as it will be started: its command and its environment
process      a task's process, and its process group
reports      what tasks report to their agent
sharing      whether hosts see the same directory
waiting      files that a task's threads wait for
preemption   whether this machine is about to be taken away
descendants  what tasks leave behind
agent        the agent, as the one object of its process
connection   an agent as its supervisor has it
program      the agent's process
"""
