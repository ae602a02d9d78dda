"""Shows a job to a person: lines, messages, and on a terminal a table.

Come here for what the terminal shows and leaves out.

lines    lines without TensorFlow's notes
output   a task's output: into its log, and as whole lines to the display
display  the terminal, written to by its own thread
follow   showing a job that something else supervises
"""
