"""Processes that would train apart, or into NaN, or run out of memory: all end, with a sentence, and soon."""

import contextlib
import json

import processes
import pytest

pytestmark = pytest.mark.slow

RUNS = """
import dataclasses, json, os, sys
import toolkit
from toolkit.cli.program import exit_code
from toolkit.errors import CheckpointError, Diverged
from toolkit.training import CheckpointStore, Run
from toolkit.training import state
from toolkit.training.arrays import Arrays

toolkit.cli.console.show_log()
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = toolkit.strategies.create("auto")
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(12 * 8, 4)).astype("float32")
x[4 * 8 + 7] = np.nan  # In the fifth batch, of the second replica's share.


def train(resume, **settled):
    # Which steps checkpoints are written after is the chief's to say.
    with Run("run", recipe="test", resume=resume, chief=me == 0, checkpoint_steps=2 + me) as run:
        run.record_config(**settled)
        run.check_same(strategy)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        import tensorflow as tf
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 0)).batch(8, drop_remainder=True).repeat()
        run.fit(model, data, epochs=3, steps_per_epoch=4)


try:
    train(resume=False)
except Diverged as error:
    print("DIVERGED", error, flush=True)

load = CheckpointStore.load


def damaged(store):  # Only the chief has one.
    raise CheckpointError(asked="resume", found="all is damaged", remedy="Begin again")


CheckpointStore.load = damaged
try:
    train(resume=True)
except CheckpointError as error:
    print("REFUSED", error, flush=True)
CheckpointStore.load = load
restore = state.restore


def corrupting(model, arrays):
    if me == 1:
        later = dict(arrays.later)  # All tasks read each of them together, once.
        right = later["optimizer/0002"]
        later["optimizer/0002"] = dataclasses.replace(right, read=lambda: right.read() + 1)
        arrays = Arrays(later)
    restore(model, arrays)


state.restore = corrupting
sys.exit(exit_code(lambda: train(resume=True), interrupted=""))
"""


def test_nan_on_one_replica_ends_all_and_an_unlike_restore_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(RUNS)
    with processes.group(["train.py"], [[], []], tmp_path) as group:
        codes = group.wait(limit=200)
        outputs = group.outputs
    assert codes == [2, 2], outputs
    assert "REFUSED resume, but all is damaged. Begin again." in outputs[0]
    assert "REFUSED all tasks train together, but worker:0 can't begin: resume, but all is damaged." in outputs[1]
    for text in outputs:
        assert "DIVERGED Training has diverged: after step 6, " in text
        assert "the last good one is step 4 in " in text
        assert "all tasks continue after step 4 with what worker:0 has restored" in text
        assert "but worker:1 holds another optimizer/0002. Resume" in text
        assert "Traceback" not in text
    assert json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=pytest.fail)["status"] == "diverged"
    found = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert found == ["step-00000002", "step-00000004", "step-00000004-end"]


@pytest.mark.long
def test_other_flags_on_one_worker_are_refused_by_both(tmp_path):
    flags = ["--data=shapes", "--epochs=1", "--run_dir=run"]
    others = ["--seed=2", "--global_batch_size=64", "--steps_per_epoch=5", "--model=alexnet"]
    own = [[*flags, "--steps_per_epoch=6"], [*flags, *others]]
    with processes.group(["-m", "recipes.cifar_multi_worker"], own, tmp_path) as group:
        codes = group.wait(limit=200)
        outputs = group.outputs
    assert codes == [2, 2], outputs
    for text in outputs:
        assert "worker:1 has model=alexnet, seed=2, fingerprint=" in text
        assert "and 2 more" in text
        assert "Traceback" not in text


RENDEZVOUS = """
import json, os, sys
job, index = sys.argv[1:]
config = json.loads(os.environ["TF_CONFIG"])
config["task"]["index"] = int(index)
os.environ.update(TF_CONFIG=json.dumps(config), TOOLKIT_JOB_ID=job)
import toolkit
from toolkit.cli.program import exit_code
sys.exit(exit_code(lambda: toolkit.strategies.create("auto"), interrupted=""))
"""


def test_a_task_of_an_earlier_job_and_one_that_is_started_twice_are_refused(tmp_path):
    (tmp_path / "train.py").write_text(RENDEZVOUS)
    both = [("stale", [["slurm-7", "0"], ["slurm-8", "1"]]), ("twice", [["slurm-7", "0"], ["slurm-7", "0"]])]
    with contextlib.ExitStack() as stack:
        groups = []
        for name, own in both:
            (tmp_path / name).mkdir()
            groups.append(stack.enter_context(processes.group([tmp_path / "train.py"], own, tmp_path / name)))
        ends = [(group.wait(limit=100), group.outputs) for group in groups]
    for codes, outputs in ends:
        assert codes == [2, 2], outputs
        assert all("Traceback" not in text for text in outputs)
    (_, stale), (_, twice) = ends
    assert "their jobs differ: slurm-7, attempt 1 here, slurm-8, attempt 1 there. End what is left" in stale[0]
    assert "their jobs differ: slurm-8, attempt 1 here, slurm-7, attempt 1 there. End what is left" in stale[1]
    assert all("this process is to be worker:0, but another process has the same task" in text for text in twice)


MEMORY = """
import json, os, resource
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Hungry(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and me == 1:
            used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
            {how}


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((400, 3)), np.ones((400, 1)), batch_size=4, verbose=0, callbacks=[Hungry()])
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("how", "said"),
    [("np.ones(2**30)", "MemoryError"), ("print(tf.zeros([2**14, 2**16]) + 1)", "ResourceExhausted|bad_alloc")],
    ids=["NumPy", "TensorFlow"],
)
def test_a_worker_without_memory_is_named_and_ends_the_job(tmp_path, how, said):
    (tmp_path / "train.py").write_text(MEMORY.replace("{how}", how))
    done = processes.launch(tmp_path, "--grace=3", "train.py", limit=150)
    assert done.returncode not in (0, 2), done.stdout
    assert "worker:1 failed first" in done.stderr
    assert any(word in done.stderr for word in said.split("|")), done.stderr
