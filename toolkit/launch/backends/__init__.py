"""The places where a job can run, one folder for each; none imports another.

Come here to change what happens under one of them only; what all share is in `toolkit.launch`.

kubernetes  manifests: Indexed Job, JobSet, TFJob
slurm       a batch script, its submission, restarts from the last checkpoint
ssh         one job on several hosts: an agent on each, watched from here
"""
