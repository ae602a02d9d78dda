"""Variables on parameter servers, and steps handed out to workers.

options    where variables live, and how asynchronous training is
private    what only private parts of TensorFlow allow
server     the life of a worker or ps: it serves until the chief is done
sharded    a variable cut into rows that several ps hold
placement  which task holds which variable, and the table of it
ledger     what each ps has applied, once each, and how stale it was
local      a step's own copy of the variables
step       a step: pull, compute, push
rounds     steps that the workers do together
sources    where a step's batch comes from
dispatch   steps on their way to workers and back
session    what `fit`, `evaluate` and `predict` call
"""

from toolkit.parameter_servers.options import Options

__all__ = ["Options"]
