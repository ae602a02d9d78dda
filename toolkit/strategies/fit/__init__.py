"""What Keras's `fit`, callbacks and saving need under a strategy, with everything that is wrapped of Keras.

building      a model's variables, made before its first step
equality      whether replicas have the same weights, at the start and while they train
models        what models of our strategies have instead of some of Keras's methods
callbacks     callbacks of several processes: who writes, who stops
recompute     activations computed again in the backward pass: keras.RematScope on TensorFlow
adapt         the list of what is wrapped, in order
"""
