"""Keras's own loops under parameter servers, in real processes, undisturbed and killed in mid-step."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import preloaded
import processes
import pytest

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("served.py")


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*flags, tasks=processes.SERVED, command=None, **options):
        options = {"epochs": 2, "steps": 60, **options}
        given = command or [str(SCRIPT), "out.json", json.dumps(options)]
        started.append(processes.Job(tmp_path, [*tasks, *flags], given))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(30)


def result(folder):
    return json.loads((folder / "out.json").read_text())


def counted(seen, *, epochs=2, steps=60, batch=16):
    """What is exact whatever the workers did."""
    assert seen["iterations"] == epochs * steps
    assert seen["history"]["seen"] == [steps * batch] * epochs
    assert seen["rates"] == pytest.approx([0.01 - 0.009 * (n + 1) / epochs for n in range(epochs)], rel=1e-5)
    assert sum(seen["staleness"].values()) == seen["updates"]
    assert seen["evaluated"]["seen"] == 203
    assert seen["evaluated"]["accuracy"] * 203 == pytest.approx(round(seen["evaluated"]["accuracy"] * 203), abs=1e-3)
    assert seen["predicted"] == seen["here"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param(
            {"numbered": False, "servers": {"variables": "sharded", "min_shard_bytes": 512, "steps_per_dispatch": 4}},
            marks=pytest.mark.long,
        ),
        {"numbered": False, "servers": {"synchronous": True}},
        pytest.param({"servers": {"max_staleness": 1, "variables": "balanced"}}, marks=pytest.mark.long),
    ],
    ids=["free", "sharded, sent, 4 at once", "rounds, sent", "bounded"],
)
def test_every_step_counts_once_under_three_workers(job, tmp_path, options):
    run = job(tasks=("--chief", "--workers=3", "--ps=2"), **options)
    assert run.wait(limit=120) == 0, run.text[-3000:]
    seen = result(tmp_path)
    counted(seen)
    assert seen["updates"] == 120
    oldest = max(map(int, seen["staleness"]))
    servers = options.get("servers", {})
    if servers.get("synchronous"):
        assert oldest == 0
    else:
        assert oldest >= 1
        assert oldest <= servers.get("max_staleness", 1000)
    sharded = servers.get("variables") == "sharded"
    load = [size for task, size in seen["bytes_by_task"].items() if task.startswith("ps")]
    assert (max(load) < 1.2 * min(load)) == sharded  # Whole, the hidden layer's kernel outweighs all others.


@pytest.mark.long
def test_a_ps_without_variables_is_not_missed(job, tmp_path):
    run = job(tasks=("--chief", "--workers=1", "--ps=5"), epochs=1)  # Of four variables.
    assert run.wait(limit=120) == 0, run.text[-3000:]
    seen = result(tmp_path)
    counted(seen, epochs=1)
    assert seen["updates"] == 60
    assert "not in the ledgers" not in run.text


@pytest.mark.fault
def test_a_killed_worker_costs_nothing_and_its_successor_gets_steps(job, tmp_path):
    run = job("--max_restarts=1", epochs=2, steps=4000, width=1024, wait=str(tmp_path / "go"))
    run.until(r"batch 60\n")
    run.kill("worker:1")
    run.until(r"worker:1 was ended by SIGKILL; starting it again, restart 1 of 1")
    (log,) = (tmp_path / "logs").glob("launch-*/worker-1.log")
    run.until(lambda: log.read_text(errors="replace").count("worker:1 serves at") == 2, limit=100)
    # A new connection is tried after waits that grow; the last epoch begins when there is one, and is
    # long enough for what the worker has to make again.
    run.until("Cluster successfully recovered", limit=100)
    (tmp_path / "go").touch()
    assert run.wait(limit=150) == 0, run.text[-3000:]
    seen = result(tmp_path)
    counted(seen, epochs=2, steps=4000)
    assert seen["updates"] == 8000
    assert seen["dispatches_run_again"] >= 1
    assert seen["steps_by_worker"]["worker:1"] > 50


def launched(folder, *arguments, tasks=processes.FEW):
    ended = processes.launch(folder, *arguments, tasks=tasks, limit=90)
    return ended.returncode, ended.stdout + ended.stderr


RECIPE = ("-m", "recipes.cifar_parameter_server", "--data=shapes")


@pytest.mark.parametrize(
    ("tasks", "flags", "said"),
    [
        (("--workers=2",), (), "the cluster has no ps"),
        (processes.FEW, ("--synchronous", "--max_staleness=1"), "Leave one of the two out"),
        (("--chief", "--ps=1"), (), "no task trains"),
    ],
)
def test_what_cannot_be_ends_with_2_and_a_sentence(tmp_path, tasks, flags, said):
    code, text = launched(tmp_path, *RECIPE, *flags, tasks=tasks)
    assert code == 2, text[-2000:]
    assert said in text
    assert "Traceback" not in text


FITTED = """
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile({optimizer}, "mse")
model.fit(numpy.ones((4, 2)), numpy.ones(4), verbose=0)
"""
IN_A_WORKER = "import keras, numpy\nif True:" + FITTED.format(optimizer="'sgd'")
ACCUMULATING = (
    "import toolkit\nstrategy = toolkit.strategies.create()\nimport keras, numpy\nwith strategy.scope():"
    + FITTED.format(optimizer="keras.optimizers.SGD(gradient_accumulation_steps=2)")
)


@pytest.mark.parametrize(
    ("text", "tasks", "said"),
    [
        (IN_A_WORKER, processes.FEW, "in a job with parameter servers only the chief trains"),
        pytest.param(ACCUMULATING, processes.SERVED, "to which others still add", marks=pytest.mark.long),
    ],
)
def test_a_fit_that_can_not_be_ends_with_2(tmp_path, text, tasks, said):
    script = tmp_path / "train.py"
    script.write_text(text)
    code, shown = launched(tmp_path, str(script), tasks=tasks)
    assert code == 2, shown[-2000:]
    assert said in shown


def test_a_script_that_only_knows_tensorflow_trains_unchanged(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf, keras, numpy as np\n"
        "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()\n"
        "if resolver.task_type in ('worker', 'ps'):\n"
        "    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type,\n"
        "                         task_index=resolver.task_id, protocol='grpc').join()\n"
        "strategy = tf.distribute.ParameterServerStrategy(resolver)\n"
        "with strategy.scope():\n"
        "    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])\n"
        "    model.compile('adam', 'mse')\n"
        "x = np.ones((64, 8), 'float32')\n"
        "model.fit(x, x.sum(1), epochs=2, batch_size=8, verbose=0)\n"
        "print('steps', int(model.optimizer.iterations.numpy()))\n"
    )
    code, text = launched(tmp_path, str(script))
    assert code == 0, text[-2000:]
    assert "steps 16" in text


@pytest.mark.long
def test_a_loop_of_the_user_s_own_trains_sharded_variables_as_one_device_does(tmp_path):
    script = pathlib.Path(__file__).with_name("served_loop.py")
    code, text = launched(tmp_path, str(script), "out.json")
    assert code == 0, text[-2000:]
    seen = json.loads((tmp_path / "out.json").read_text())
    assert seen["sharded"] > 0
    for mine, theirs in zip(seen["served"], seen["here"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_the_gradient_of_a_python_function_is_computed_where_the_function_is(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import toolkit\nstrategy = toolkit.strategies.create()\nimport keras, tensorflow as tf, numpy as np\n"
        "def loss(y, p):\n"
        "    each = tf.py_function(lambda a, b: tf.reduce_mean((a - b) ** 2, -1), [y, p], tf.float32)\n"
        "    return tf.ensure_shape(each, (None,))\n"
        "def fitted(loss):\n"
        "    keras.utils.set_random_seed(1)\n"
        "    with strategy.scope():\n"
        "        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])\n"
        "        model.compile('sgd', loss)\n"
        "    x = np.ones((20, 8), 'float32')\n"
        "    return model.fit(x, x[:, :1], batch_size=8, verbose=0).history['loss'][0]\n"
        "print('losses', abs(fitted(loss) - fitted('mse')) < 1e-6)\n"
    )
    code, text = launched(tmp_path, str(script))
    assert code == 0, text[-2000:]
    assert "losses True" in text


@pytest.mark.long
def test_a_partitioner_with_nothing_to_split_is_said(tmp_path):
    flags = ("--epochs=1", "--steps_per_epoch=2", "--variables=sharded", "--min_shard_kib=999999", "--run_dir=it")
    code, text = launched(tmp_path, *RECIPE, *flags)
    assert code == 0, text[-2000:]
    assert "No variable is sharded" in text


@pytest.mark.long
def test_an_evaluator_follows_the_checkpoints_to_the_last(tmp_path):
    flags = ("--epochs=2", "--steps_per_epoch=10", "--run_dir=it")
    code, text = launched(tmp_path, *RECIPE, *flags, tasks=(*processes.FEW, "--evaluator"))
    assert code == 0, text[-2000:]
    rows = (tmp_path / "it" / "evaluation.csv").read_text().splitlines()
    history = (tmp_path / "it" / "history.csv").read_text().splitlines()
    last = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
    theirs = dict(zip(history[0].split(","), history[-1].split(","), strict=True))
    assert last["step"] == "20"
    assert float(last["accuracy"]) == pytest.approx(float(theirs["val_accuracy"]), abs=1e-6)


def test_tasks_with_different_flags_say_so(tmp_path):
    """Started by hand, one of them with another seed."""
    from toolkit.launch.agent.ports import ENVIRONMENT, HeldPorts

    with HeldPorts() as held:
        names = ("chief:0", "worker:0", "ps:0")
        cluster = {name.partition(":")[0]: [f"127.0.0.1:{held.free()}"] for name in names}
        running = []
        for number, name in enumerate(names):
            config = {"cluster": cluster, "task": {"type": name.partition(":")[0], "index": 0}}
            running.append(
                preloaded.Popen(
                    [sys.executable, *RECIPE, f"--seed={number // 2}", "--start_timeout=60"],
                    env={
                        **os.environ,
                        **ENVIRONMENT,
                        "PYTHONPATH": str(processes.ROOT),
                        "TF_CONFIG": json.dumps(config),
                        "TF_CPP_MIN_LOG_LEVEL": "3",
                    },
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            chief, ps = (running[number].communicate(timeout=60)[0] for number in (0, 2))
        finally:
            for process in running:
                process.kill()
                process.communicate()
    assert (running[0].returncode, running[2].returncode) == (2, 2)
    for text in (chief, ps):
        assert "their flags differ" in text
        assert "--seed=1" in text
