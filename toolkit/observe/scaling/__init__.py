"""How a recipe's speed grows with replicas: measured, fitted to a law, and put in words.

request  what is to be measured, checked
law      the share that can't be parallelised: Amdahl's and Gustafson's laws
running  the recipe at one size, in a process of its own
verdict  what bounds it, and what to do
"""

from toolkit.observe.scaling.law import Size, serial_share
from toolkit.observe.scaling.request import Request
from toolkit.observe.scaling.running import measure
from toolkit.observe.scaling.verdict import verdict

__all__ = ["Request", "Size", "measure", "serial_share", "verdict"]
