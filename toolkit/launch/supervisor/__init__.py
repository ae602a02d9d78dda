"""Decides what happens to a job: attempts, restarts, failures, hangs and signals.

Come here for what becomes of a job when something happens to its tasks: `decide` has it in one table.

decide      what follows from what has happened: a table
state       what is known of a job's tasks from their events, and the message about the first that failed
stacks      where tasks are that make no progress, by their Python stacks
agents      a job's hosts and their agents: called, checked, called again, laid out as a cluster
task_group  the tasks of one attempt: started, watched, ended, and what is done about what happens to them
supervise   a job from its start to its end, attempt by attempt
"""
