"""How variables and gradients are shared: one file per strategy, and a table of names.

one_device   everything on one device
mirrored     a replica on each device of this machine, gradients all-reduced
table        names, `create`, and what "auto" means
"""

from toolkit.strategies.table import NAMES, create

__all__ = ["NAMES", "create"]
