"""Decides what happens to a job: attempts, restarts, failures, hangs and signals.

Come here for what becomes of a job when something happens to its tasks: `decide` has it in one table.

decide     what follows from what has happened: a table
state      what is known of a job's tasks from their events, and what follows from it
failure    the message about the task that failed first
stacks     where tasks are that make no progress, by their Python stacks
layout     which task runs on which host, and at which address
agents     the agents of a job: called, checked, called again
crew       the tasks of one attempt, together: taken in, signalled, ended
attempt    one start of a job: what is done about what happens
supervise  a job from its start to its end, attempt by attempt
"""
