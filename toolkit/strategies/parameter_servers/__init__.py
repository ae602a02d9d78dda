"""What `fit` needs with variables on parameter servers and steps that the chief dispatches.

The chief runs `fit`; a step pulls variables from the ps, computes on a worker, and pushes gradients, each applied once.

internals  what only private parts of TensorFlow and Keras allow
ps_sharded_variable  a variable whose rows are sharded over several ps
placement  which task holds which variable, and the table of it
ledger     what each ps has applied, once each, and with which staleness
local_values  what takes a variable's place in a step
tables     large tables of which a step pulls and pushes a few rows
variables  a model's variables, by what a step does with them, and a step's own copy
pushes     what a step assigns, sent to the ps
worker_step  a step: pull, compute, push
updates    of variables that are sharded, in a step and in the user's own loop
whole_metrics  metrics whose state is no sum
functions  what workers run: steps of training, batches to evaluate or predict
sources    where a step's batch comes from
dispatch   steps on their way to workers and back, and how many at once
share_step  a step of which each worker computes a share
rounds     steps that the workers do together
totals     what the chief keeps: counters, and totals of the metrics
calls      functions traced once, and calls of them for workers
session    what `fit`, `evaluate` and `predict` call
strategy   the chief's strategy; a worker or ps serves until the chief is done
"""
