"""The description of a job, made once, with the check of each value.

Come here for a flag of `toolkit launch`: an attribute of JobSpec is one, and its rule stands in `checks`.

options      an attribute of a job that is a flag, too
checks       the rules that a job's values follow, each with its sentence
site_checks  what sbatch and kubectl can't know
hosts        the machines that a job is to run on
site         what a site or a project always asks for, from toolkit.toml
spec         JobSpec: all of it, for every place
"""
