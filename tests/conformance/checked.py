"""One switch: whether first steps of what these tests compare with one device are compared tensor by tensor, too.

    CHECKED_STEPS=first_step python -m pytest -m "slow or long" tests/conformance

A test that fails then names the layer. The part "checked" of scripts/test-all runs so.
"""

import os

CHECK = os.environ.get("CHECKED_STEPS", "none")
