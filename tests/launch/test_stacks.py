"""Where a task stands, read from what faulthandler writes."""

import os
import subprocess
import sys
import sysconfig
import time

import limits
import pytest

from toolkit.launch.agent.process import files_waited_for
from toolkit.launch.supervisor.stacks import culprits, folded, locate, places

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


FUNCTION = f"""Thread 0x00007f (most recent call first):
  File "/home/me/train.py", line 12 in load
  File "{LIBRARY}/tensorflow/python/ops/script_ops.py", line 147 in __call__

{IN_STEP}"""


def test_a_function_of_the_input_pipeline_is_named_before_what_waits_for_it():
    found = locate(FUNCTION)
    assert (found.in_tensorflow, found.input) == (True, "train.py, line 12, in load")
    words = culprits({"worker:0": locate(IN_STEP), "worker:1": found})
    assert words.endswith("The input of worker:1 is at train.py, line 12, in load.")
    assert culprits({"worker:0": locate(IN_STEP)}) == "All tasks are inside TensorFlow."


def test_a_generator_is_named_and_not_who_waits_for_it():
    waits = '  File "/any/toolkit/strategies/batches.py", line 71 in _read_ahead\n'
    found = locate(FUNCTION.replace(IN_STEP, f"Current thread 0x00007e (most recent call first):\n{waits}"))
    words = culprits({"worker:0": locate(IN_STEP), "worker:1": found})
    assert words == "The others wait for worker:1, which is at train.py, line 12, in load."


def test_frames_of_libraries_are_folded_and_their_threads_left_out():
    assert folded(STUCK) == (
        "Current thread 0x00007e (most recent call first):\n"
        '  File "/home/me/train.py", line 31 in on_batch_end\n'
        "  ... 1 frame of libraries\n"
        '  File "/home/me/train.py", line 90 in <module>'
    )
    assert "script_ops" not in folded(FUNCTION)
    assert "line 12 in load" in folded(FUNCTION)
    assert folded("") == ""


def test_so_is_a_file_that_is_waited_for():
    assert locate(f"{IN_STEP}A thread waits for the file /data/a b\n").input == "/data/a b"


@pytest.mark.slow
def test_what_a_thread_reads_is_seen_from_outside(tmp_path):
    os.mkfifo(tmp_path / "one")
    os.mkfifo(tmp_path / "another")
    code = (
        "import os, sys, threading, time\n"
        "threading.Thread(target=open, args=(sys.argv[1],), daemon=True).start()\n"
        "os.read(os.open(sys.argv[2], os.O_RDWR), 1)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "one", tmp_path / "another"]) as process:
        deadline = time.monotonic() + limits.patient(20)
        while len(found := files_waited_for(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert found == [str(tmp_path / "another"), str(tmp_path / "one")]
    assert files_waited_for(process.pid) == []


def test_each_place_is_a_line_with_the_tasks_that_are_there():
    found = {"worker:0": locate(IN_STEP), "worker:1": locate(STUCK), "worker:2": locate(IN_STEP), "worker:3": None}
    assert places(found).splitlines() == [
        "  worker:0, worker:2: inside TensorFlow, called at train.py, line 90, in <module>",
        "  worker:1: train.py, line 31, in on_batch_end",
        "  worker:3: no answer",
    ]
    assert places({"worker:0": locate(FUNCTION)}).endswith("; its input is at train.py, line 12, in load")


CONVERTED = """
import numpy as np, tensorflow as tf
def mapped(number):
    def read(number):
        import time
        if number > 2:
            time.sleep(1000)  # line 9
        return np.float32(1.0)
    read_one = tf.py_function(
        read, [number], tf.float32
    )
    return read_one if number > 0 else 0.0
print(len(list(tf.data.Dataset.range(9).map(mapped))))
"""


@pytest.mark.slow
def test_a_line_that_autograph_has_converted_is_named_as_the_user_wrote_it(launcher):
    code, _, err, _ = launcher.run("--workers=1", "--stall_timeout=6", "--grace=1", body=CONVERTED)
    assert code == 1
    assert "at train it's.py, line 9, in read." in err
    assert "__autograph_generated" not in next(launcher.logs().glob("worker-0*.log")).read_text()


def test_what_is_no_stack():
    assert locate("") is None
    assert locate("Segmentation fault\n") is None
