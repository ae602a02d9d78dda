"""Starts, signals and watches the tasks of one machine, and reports events.

Come here for how a task is started on its machine, and for what becomes of its processes.

ports        ports that stay this job's from their choice to its end, and to whom they are open
tasks        a task as it will be started: its command and its environment
process      a task's process, its group, and what it leaves behind
connection   an agent as its supervisor has it, at the other end of pipes or a socket
program      the agent itself, the one object of its process
"""
