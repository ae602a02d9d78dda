"""Runs inside a task's process, around the user's script.

Come here for what a script that knows nothing of this toolkit is given.

patching  TensorFlow's names for its strategies, given to ours in the user's script
progress  step and speed of whatever trains by `fit`
called    a function in the place of a script
child     what runs before the script does
"""
