"""Variables of which each process has a part (multiprocess/test_apart.py has several processes)."""

import types

import numpy as np
import tensorflow as tf

from toolkit.strategies.step import sharded_variable


def test_a_read_takes_no_new_key_of_tensorflow_s_each_time(monkeypatch):
    """TensorFlow keeps what it knows of a key until the process ends: 1.2 KiB for each read of each checkpoint."""
    keys = []

    def gather(*, instance_key, **given):
        keys.append(instance_key)
        return tf.constant(np.concatenate([given["input"]] * 2))

    monkeypatch.setattr(sharded_variable, "processes", lambda _: 2)
    monkeypatch.setattr(tf.raw_ops, "CollectiveGatherV2", gather)
    strategy = types.SimpleNamespace()
    kinds = [np.zeros(shape, dtype) for shape in [(3,), (4,), (2, 2), ()] for dtype in ("float32", "int32")]
    for _ in range(5):
        for kind in kinds:
            assert len(sharded_variable.gathered([kind], strategy)) == 2
    assert len(set(keys)) == len(kinds)
    assert keys == keys[: len(kinds)] * 5
    assert all(0 < key < 2**31 for key in keys)
