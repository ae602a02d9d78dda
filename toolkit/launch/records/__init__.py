"""A job's files on disk, and the list through which its user finds them.

Come here for the files beside the logs, and for what `toolkit jobs` lists.

snapshot    a copy of a script's files
record      logs, what was asked for, what happened, the first failure
controller  what Slurm's controller is asked for
jobs        jobs that this user has started
"""
