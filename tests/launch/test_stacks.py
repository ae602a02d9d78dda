"""Where a task stands, read from what faulthandler writes."""

import sysconfig

from toolkit.launch.supervisor.stacks import locate

LIBRARY = sysconfig.get_path("purelib")
STUCK = f"""Thread 0x00007f (most recent call first):
  File "{sysconfig.get_path("stdlib")}/threading.py", line 320 in wait

Current thread 0x00007e (most recent call first):
  File "/home/me/train.py", line 31 in on_batch_end
  File "{LIBRARY}/keras/src/callbacks/callback_list.py", line 200 in call
  File "/home/me/train.py", line 90 in <module>
"""
IN_STEP = f"""Current thread 0x00007e (most recent call first):
  File "{LIBRARY}/tensorflow/python/eager/execute.py", line 53 in quick_execute
  File "{LIBRARY}/keras/src/backend/tensorflow/trainer.py", line 240 in function
  File "/home/me/train.py", line 90 in <module>
"""


def test_a_task_in_the_users_own_code():
    found = locate(STUCK)
    assert not found.in_tensorflow
    assert found.words == "train.py, line 31, in on_batch_end"


def test_a_task_inside_tensorflow():
    found = locate(IN_STEP)
    assert found.in_tensorflow
    assert found.words == "train.py, line 90, in <module>"


def test_what_is_no_stack():
    assert locate("") is None
    assert locate("Segmentation fault\n") is None
