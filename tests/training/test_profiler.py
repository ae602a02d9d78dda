"""Where a step's time goes: intervals by hand, and a profile of TensorFlow's."""

import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from toolkit import strategies
from toolkit.training import step_time as breakdown
from toolkit.training.checkpoints import Position
from toolkit.training.progress import Progress
from toolkit.training.step_time import Profiler

MS = 10**9  # Picoseconds.


def event(line, name, begin, end, plane="/host:CPU"):
    return breakdown._Event(plane, line, name, begin * MS, end * MS)


STEPS = [event("python", "toolkit_step#step_num=0#", 0, 10), event("python", "toolkit_step#step_num=1#", 10, 20)]
FUNCTIONS = [event("python", "TFE_Py_ExecuteCancelable", 1, 9), event("python", "FunctionRun", 11, 19)]


def parts(*events, replicas=1):
    found = breakdown._breakdown([*STEPS, *FUNCTIONS, *events], replicas)
    assert found.compute + found.communication + found.input + found.other == pytest.approx(found.milliseconds)
    assert (found.steps, found.milliseconds) == (2, 10)
    return found.compute, found.communication, found.input, found.other


def test_what_is_hidden_behind_computing_is_not_counted():
    compute = [event("tf_Compute/1", "conv:Conv2D", 1, 6), event("tf_Compute/2", "other:Conv2D", 5, 8)]
    waiting = event("tf_data_iterator_get_next/1", "IteratorGetNextOp::DoCompute#id=1#", 0, 3)
    assert parts(*compute, waiting) == (3.5, 0, 0.5, 6.0)


def test_collectives_and_on_several_replicas_idle_time_are_communication():
    events = [
        event("tf_Compute/1", "conv:Conv2D", 2, 6),
        event("tf_Compute/1", "CollectiveReduceV2_4:CollectiveReduceV2", 6, 7),
        event("collective_ops/2", "Loop", 5, 8),
    ]
    assert parts(*events, replicas=2) == (2.0, (2 + 1 + 1 + 8) / 2, 0, 2.0)
    assert parts(*events, replicas=1) == (2.0, 1.0, 0, 7.0)


def test_how_much_of_the_exchanges_is_hidden():
    events = [
        event("tf_Compute/1", "conv:Conv2D", 2, 6),
        event("tf_Compute/1", "CollectiveGatherV2:CollectiveGatherV2", 6, 7),
        event("collective_ops/1", "StatefulPartitionedCall/CollectiveGatherV2_1", 4, 8),
        event("collective_ops/1", "CollectiveExecutor", 4, 5),
        event("collective_ops/2", "CollectiveReduceV2", 13, 15),
    ]
    found = breakdown._breakdown([*STEPS, *FUNCTIONS, *events], 2)
    assert (found.exchanging, found.hidden, found.exchanges) == (3.0, 1.0, 1.0)


def test_on_gpus_only_their_streams_compute():
    gpu = "/device:GPU:0"
    events = [
        event("tf_Compute/1", "conv:Conv2D", 1, 9),
        event("Stream #13(compute)", "volta_sgemm", 2, 6, gpu),
        event("Stream #20", "ncclDevKernel_AllReduce_Sum_f32", 5, 9, gpu),
        event("XLA Ops", "fusion", 0, 20, gpu),
    ]
    compute, communication, *_ = parts(*events, replicas=2)
    assert (compute, communication) == (2.0, (3 + 1 + 8) / 2)


def test_a_step_lasts_until_the_next_one_begins():
    callbacks = event("python", "toolkit_end", 26, 26)
    found = breakdown._breakdown([*STEPS, *FUNCTIONS, callbacks], 1)
    assert (found.steps, found.milliseconds, found.between) == (2, 13, 5)


def test_without_a_whole_step_there_is_none():
    assert breakdown._breakdown(FUNCTIONS, 1) is None


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(SPANS, SPANS)
def test_intervals_are_those_of_sets(one, other):
    def points(spans):
        return {n for begin, end in spans for n in range(begin, end)}

    left = breakdown._without(breakdown._merged(one), breakdown._merged(other))
    assert points(left) == points(one) - points(other)
    assert breakdown._length(left) == len(points(left))


def trained(tmp_path, devices, *callbacks, steps=0, keep=False, **options):
    strategy = strategies.create("auto", devices=devices)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tracker = Progress(epochs=1, resumed=Position())
    profiling = Profiler(steps=steps, keep=tmp_path if keep else None, progress=tracker)
    data = tf.data.Dataset.from_tensors((np.ones((32, 64)), np.ones((32, 1))))
    callbacks = [tracker, profiling, *callbacks]
    options = {"x": data.repeat(), "steps_per_epoch": 20, "epochs": 1, **options}
    model.fit(callbacks=callbacks, verbose=0, shuffle=False, **options)
    return tracker.breakdown and types.SimpleNamespace(**tracker.breakdown)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_profile_of_tensorflows_is_understood(tmp_path, four_devices, replicas):
    found = trained(tmp_path, four_devices[:replicas])
    assert found.steps == 5
    assert 0 < found.compute <= found.milliseconds
    assert (found.communication > 0) == (replicas > 1)
    assert found.other > 0, "Python between steps"
    total = found.compute + found.communication + found.input + found.other
    assert total == pytest.approx(found.milliseconds, abs=0.01)
    assert not list(tmp_path.iterdir())


def test_a_profile_without_a_whole_step_leaves_an_earlier_process_s_breakdown(tmp_path):
    progress = Progress(epochs=1, resumed=Position(), breakdown={"milliseconds": 3.0})
    profiler = Profiler(steps=0, keep=None, progress=progress)
    profiler.set_model(types.SimpleNamespace(distribute_strategy=tf.distribute.get_strategy()))
    profiler._directory = tmp_path / "interrupted before the first step's end"
    profiler.close()
    assert progress.breakdown == {"milliseconds": 3.0}


@pytest.mark.slow
def test_one_that_is_asked_for_is_kept_for_tensorboard(tmp_path, four_devices):
    assert trained(tmp_path, four_devices[:1], steps=3, keep=True).steps == 3
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.slow
def test_too_few_steps_give_none(tmp_path, four_devices):
    assert trained(tmp_path, four_devices[:1], steps_per_epoch=8) is None


class Sleeps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_callbacks_after_each_profiled_step_count_and_validation_does_not(tmp_path, four_devices):
    assert trained(tmp_path, four_devices[:1], Sleeps()).between >= 100, "the last step's, too"
    data = tf.data.Dataset.from_tensors((np.ones((32, 64)), np.ones((32, 1))))
    unknown = data.repeat(7).filter(lambda *_: True)  # Keras learns only in the first epoch that it has seven steps.
    options = {"x": unknown, "steps_per_epoch": None, "validation_data": data, "epochs": 2}
    found = trained(tmp_path, four_devices[:1], Sleeps(), **options)
    assert found.steps == 3
    assert found.between >= 100


@pytest.mark.slow
def test_somebody_elses_profile_goes_on(tmp_path, four_devices):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        assert trained(tmp_path, four_devices[:1]) is None
    finally:
        tf.profiler.experimental.stop()
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
