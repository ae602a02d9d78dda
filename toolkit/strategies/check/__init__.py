"""A second opinion: a model's first step is computed once more on one device, and compared tensor by tensor.

Who comes here wants to know whether a step of replicas has one device's numbers, on a user's own model and data:

whole_batches  the batch of which replicas have their parts
plain          the step as plain Keras makes it, with the same objects and plain variables
state          what a step changes: the variables, and what they hold
comparing      how far two tensors may be apart, which one device's own rounding says
notes          the outputs of layers and the gradients that a step computes on its way
diagnosis      where a step that differs begins to differ
loops          a script's own loop around `strategy.run`
watching       a script that is only compared, by `toolkit compare`
both_ways      the step on replicas and on one device, and how they are judged
fewer_rows     a batch's first rows, where one device can't hold all of them
first_step     when it is compared, and what comes of it

`plain` has as little as possible of what it judges: no answer of ours, no method that was attached, no strategy.
"""
