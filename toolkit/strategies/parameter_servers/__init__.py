"""What `fit` needs with variables on parameter servers and steps that the chief dispatches.

The chief runs `fit`; a step pulls variables from the ps, computes on a worker, and pushes gradients, each applied once.

internals  what only private parts of TensorFlow and Keras allow
placement  which task holds which variable, the table of it, and variables with rows on several ps
ledger     what each ps has applied, once each, and with which staleness
local_values  what takes a variable's place in a step: its value, a cell, or a table of which it pulls a few rows
variables  a model's variables, by what a step does with them, a step's own copy, and what it sends of it
worker_step  a step: pull, compute, push; updates of variables that are sharded
functions  what workers run: steps of training, batches to evaluate or predict
sources    where a step's batch comes from
dispatch   steps on their way to workers and back, and how many at once
rounds     steps that the workers do together, each with its share of the batch
session    what `fit`, `evaluate` and `predict` call, with the counters and totals that the chief keeps
checking   first steps that are compared with one device's
strategy   the chief's strategy; a worker or ps serves until the chief is done
"""
