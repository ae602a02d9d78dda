"""Variables on parameter servers, and steps handed out to workers.

options    where variables live, and how asynchronous training is
private    what only private parts of TensorFlow and Keras allow
sharded    a variable cut into rows that several ps hold
placement  which task holds which variable, and the table of it
ledger     what each ps has applied, once each, and how stale it was
local      a step's own copy of the variables
variables  the variables of a model, by what a step does with them
tracing    a function for a worker, traced on the chief
step       a step: pull, compute, push
functions  what workers are sent
sources    where a step's batch comes from
rounds     steps that the workers do together
counting   what counts, at each step
sums       running metrics
calls      functions traced once, and what they are called with
dispatch   steps on their way to workers and back
server     the life of a worker or ps: it serves until the chief is done
pace       how many steps a worker is sent at once
session    what `fit`, `evaluate` and `predict` call
"""

from toolkit.strategies.parameter_servers.options import ParameterServerOptions

__all__ = ["ParameterServerOptions"]
