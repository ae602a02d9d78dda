"""Processes that train together: what they agree on, and how they start and end together.

agreement     values that the processes of a strategy exchange between steps, facts that must be the same, the barrier
resolver      who trains together, the wait for the others at the start and the end, and when one counts as gone
shared_files  files that every worker writes under the same name
"""
