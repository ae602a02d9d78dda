"""Processes that train together: what they agree on, and how they start and end together.

agreement     values that the processes of a strategy exchange between steps, and their barrier
consistency   facts that must be the same in all processes, and random numbers that are seeded alike
resolver      who trains together, the wait for the others, and when one counts as gone
shutdown      the shutdown barrier: processes that train together end together
shared_files  files that every worker writes under the same name
"""
