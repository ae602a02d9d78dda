"""Measures how a recipe's speed grows with the number of replicas, and finds what limits it.

verdict  the laws of Amdahl and Gustafson, and in words what bounds the speed
running  what is to be measured, and the recipe at each size in its own process
"""

from toolkit.observe.scaling.running import ScalingRequest, measure
from toolkit.observe.scaling.verdict import Size, serial_share, share_cores, verdict

__all__ = ["ScalingRequest", "Size", "measure", "serial_share", "share_cores", "verdict"]
