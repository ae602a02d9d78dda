"""Runs inside a task's process, around the user's script.

Come here for what a script that knows nothing of this toolkit is given.

patches  what TensorFlow and Keras are given in it: our strategies, and reports of progress
child    what runs before the script does
"""
