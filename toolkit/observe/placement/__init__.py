"""Where operations and variables run: chooses it beforehand, or shows it afterwards.

internals  private hooks of TensorFlow
names      devices as people write them
report     where everything ran: operations, copies between devices, variables
observing  running something once, and watching
placing    layers of a model on their own devices
"""

import lazy_loader

from toolkit.observe.placement.internals import kernels
from toolkit.observe.placement.names import device
from toolkit.observe.placement.report import Copy, Operation, Report, Variable

__all__ = ["Copy", "Operation", "Report", "Variable", "device", "kernels", "observe", "place"]

__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs={"observing": ["observe"], "placing": ["place"]})
