"""Looks at the machine and the run: what is wrong, where operations run, and how a run went.

Nothing in this wing changes a training; everything in it reads, measures, and says what to do.

placement  which device each operation and variable is on
doctor     what is wrong with this machine and environment, and the command that mends it
scaling    how a recipe's speed grows with replicas, and what bounds it
report     one page of HTML about a run, or several compared
"""

import lazy_loader

__all__ = ["doctor", "placement", "report", "scaling"]

# Imported when it is first used, because a command needs only one of them.
__getattr__, _, _ = lazy_loader.attach(__name__, __all__)
