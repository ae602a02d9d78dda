"""Where operations ran: as TensorFlow's own placement log has it, op for op, and what was moved and copied."""

import json
import os
import pathlib
import re
import subprocess
import sys

import batteries
import keras
import numpy as np
import processes
import pytest
import tensorflow as tf

from toolkit.observe.placement import observe

LOGGED = pathlib.Path(__file__).with_name("logged.py")
LINE = re.compile(r"\] ([\w/.-]+): \((\w+)\): (/job:\S+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("model", batteries.rows(["loop", "small_cnn", "placed"], "loop"))
def test_the_report_agrees_with_the_placement_log_op_for_op(tmp_path, model):
    done = subprocess.run(
        [sys.executable, str(LOGGED), model, str(tmp_path / "seen.json")],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    log = done.stderr.partition("OBSERVING")[2]
    logged = {name: where for name, kind, where in LINE.findall(log) if kind not in ("_Arg", "_Retval")}
    report = {each["name"]: each["ran"] for each in seen if each["ran"]}
    own = {each["name"] for each in seen if not each["added"]}
    assert len(logged) >= 10
    assert {name: report.get(name) for name in logged if name in own} == {n: w for n, w in logged.items() if n in own}
    assert not {each["name"] for each in seen if not each["added"]} - set(logged)


def test_an_operation_for_a_device_that_is_not_there_was_moved(four_devices):
    def both(x):
        with tf.device("CPU:3"):
            y = tf.matmul(x, x)
        with tf.device("GPU:0"):
            return tf.nn.relu(y)

    report = observe(both, tf.ones((20, 20)))
    (moved,) = report.moved
    assert (moved.kind, moved.asked, moved.because) == ("Relu", "GPU:0", "there is no GPU:0 in this process")
    assert [(c.tensor, c.source[-5:], c.target[-5:], c.bytes) for c in report.copies] == [
        ("x:0", "CPU:0", "CPU:3", 1600),
        ("MatMul:0", "CPU:3", "CPU:0", 1600),
    ]
    shown = str(report)
    assert "moved: Relu (Relu), asked for GPU:0, ran on CPU:0: there is no GPU:0" in shown
    assert "copied: MatMul:0 from CPU:3 to CPU:0, 1,600 bytes" in shown


def test_arguments_are_what_the_function_takes(four_devices):
    def total(pair, *, times):
        (a, b), result = pair, 0.0
        for _ in range(times):  # A Python number stays one: this is no loop of TensorFlow's.
            result += a + tf.reduce_sum(b)
        return result

    kinds = [each.kind for each in observe(total, [np.float32(1), np.ones(3, np.float32)], times=2).operations]
    assert kinds.count("Sum") == 2
    assert not {"While", "StridedSlice", "Pack"} & set(kinds)


def test_a_model_of_several_inputs(four_devices):
    inputs = [keras.Input((2,)), keras.Input((3,))]
    model = keras.Model(inputs, keras.layers.Concatenate()(inputs))
    kinds = [each.kind for each in observe(model, tf.ones((1, 2)), tf.ones((1, 3))).operations]
    assert "ConcatV2" in kinds


def test_variables_and_what_reads_them(four_devices):
    with tf.device("CPU:2"):
        variable = tf.Variable(tf.ones((3, 5)))
    report = observe(lambda x: x + variable, tf.ones((3, 5)))
    (held,) = report.variables
    assert (held.device[-5:], held.bytes) == ("CPU:2", 60)
    assert "CPU:2: " in str(report)


def test_what_ran_before_is_placed_again_and_nothing_else_is_listed(four_devices):
    @tf.function
    def double(x):
        return x * 2.0

    double(tf.ones(3))
    tf.linalg.det(tf.eye(3))
    kinds = [each.kind for each in observe(double, tf.ones(3)).operations]
    assert "Mul" in kinds
    assert "MatrixDeterminant" not in kinds


def test_a_model_is_called_as_in_predict(four_devices):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    report = observe(model, tf.ones((2, 4)))
    assert len(report.variables) == 3, "kernel, bias, and the dropout's seed"
    assert not [each for each in report.operations if "Random" in each.kind]
