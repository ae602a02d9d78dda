"""What is relied upon of Keras and TensorFlow though it may change, each in one place.

train_function  the functions that Keras's loops call for a step, and the order of what stands around them
"""
