"""What a job leaves on disk, and where its user finds it again.

Come here for the files beside the logs, and for what `toolkit jobs` lists.

snapshot    a copy of a script's files
record      logs, what was asked for, what happened, the first failure
controller  what Slurm's controller is asked for
jobs        jobs that this user has started
"""
