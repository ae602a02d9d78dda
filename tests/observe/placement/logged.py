"""Observes a model while TensorFlow writes its own placement log.

python logged.py MODEL OUT.json
"""

import dataclasses
import json
import pathlib
import sys

import keras
import tensorflow as tf

import toolkit

tf.debugging.set_log_device_placement(True)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
# Or some operations are folded into others before they run, and the log has more of them.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def loop(x):
    number = tf.constant(0)
    while number < 3:
        with tf.device("CPU:1"):
            x = tf.matmul(x, x)
        number += 1
    return tf.reduce_sum(x)


def cnn():
    return toolkit.models.build("small_cnn")


def placed():
    return toolkit.observe.placement.place(
        cnn(), lambda layer: "CPU:1" if isinstance(layer, keras.layers.Dense) else None
    )


MODELS = {"small_cnn": cnn, "placed": placed, "loop": lambda: loop}
model, out = sys.argv[1:]
function = MODELS[model]()
given = tf.ones((8, 8)) if model == "loop" else tf.zeros((2, 32, 32, 3))
sys.stderr.write("OBSERVING\n")
sys.stderr.flush()
report = toolkit.observe.placement.observe(function, given)
pathlib.Path(out).write_text(json.dumps([dataclasses.asdict(each) for each in report.operations]))
