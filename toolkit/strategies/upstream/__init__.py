"""Keras and TensorFlow as they are inside: the only room that imports, replaces or calls what is private in them.

A release that changes something of it is mended here, and a function that replaces one of theirs stands here once:

table           `table.csv` has a row for each, and is compared with what is installed before anything is used
private         what is imported from private paths, by the names of the table
replaced        the functions that are replaced for the process, and who answers a call, in order
attributes      what Keras keeps in attributes of its objects and of tensors
wrapping        how a function is replaced: for the process, for one object, or for the time of a call
train_function  the functions that Keras's loops call for a step, and the order of what stands around them
"""
