"""Small helpers for every room. None of them knows anything of training.

Come here before writing a file, masking a secret or noting a signal: each is done in one way in the whole house.

alone       a module run as a program, whatever is beside the user's script
files       writing a file so that it is there whole or not at all, and not everybody may write it; its SHA-256
redaction   which variables and flags hold secrets, and texts without them
graphs      what a result is computed from in TensorFlow's graphs, and how; work outside of its caller's graphs
versions    which packages are installed
words       numbers of things in words, and "Did you mean"
strangers   connections that haven't proved themselves: few, and each for a short time
signals     signals that ask a program to stop: recorded, or obeyed with a message
status      what a task and the launcher that started it tell each other; the phase that a task is in
goodput     how a training's time was spent: the share that made progress, and where the rest went
"""
