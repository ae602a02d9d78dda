"""`toolkit compare`: the verdict on a script, its exit code, and what becomes of the script's own files."""

import json
import pathlib

import processes
import pytest

from toolkit.cli.main import main

TEMPLATE = pathlib.Path(processes.ROOT, "toolkit/cli/templates/train.py").read_text()
SCRIPT = """
import sys
import keras, numpy as np, toolkit
from toolkit.strategies.context import this_step

if "--fault" in sys.argv:
    original = keras.optimizers.Adam.update_step
    def update(optimizer, gradient, variable, rate):
        original(optimizer, gradient, variable, rate)
        if this_step.strategy is not None and variable.shape == [5, 3]:
            optimizer._momentums[optimizer._get_variable_index(variable)].assign_add(0.01 * gradient)
    keras.optimizers.Adam.update_step = update
devices = toolkit.devices.configure(gpus=2)
with toolkit.strategies.create().scope():
    layers = [keras.layers.Dense(5, name="first"), keras.layers.Dense(3, name="second")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="mine")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
x, y = np.random.default_rng(0).normal(size=(65, 6)), np.arange(65) % 3
history = model.fit(x, y, epochs=3, batch_size=9, verbose=0, validation_data=(x, y))
print("EPOCHS", len(history.history["loss"]), "STEPS", int(model.optimizer.iterations))
model.predict(x, verbose=0)
"""


@pytest.fixture
def compare(tmp_path):
    def run(*arguments, limit=200):
        return processes.python(tmp_path, "-m", "toolkit", "compare", *arguments, limit=limit)

    return run


@pytest.mark.slow
def test_the_template_of_init_is_the_same(tmp_path, compare):
    (tmp_path / "train.py").write_text(TEMPLATE)
    done = compare("train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same, but for rounding: " in done.stdout
    assert "of 2 steps (fit, evaluate), in float32." in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_first_tensor_that_differs_is_named(tmp_path, compare):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = compare("train.py", "--fault")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "EPOCHS 1 STEPS 1" in done.stdout
    assert "Not the same. The first step of fit (mine, train.py, line 20) isn't one device's: " in done.stdout
    assert "second_kernel_momentum differs by" in done.stdout


@pytest.mark.slow
def test_a_draw_of_tensorflows_is_no_matter_of_luck(tmp_path, compare):
    """Here nothing seems to differ: what is drawn is multiplied by zero."""
    drawn = (
        'keras.layers.Lambda(lambda x: x + 0.0 * tf.random.normal(tf.shape(x))), keras.layers.Dense(5, name="first")'
    )
    script = SCRIPT.replace('keras.layers.Dense(5, name="first")', drawn).replace(
        "import sys", "import sys\nimport tensorflow as tf"
    )
    (tmp_path / "train.py").write_text(script)
    done = compare("train.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "isn't one device's: what RandomStandardNormal draws differs by chance" in done.stdout
    assert "A known difference: it draws by a state of TensorFlow's" in done.stdout


@pytest.mark.slow
def test_float64_as_json(tmp_path, compare):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = compare("--float64", "--json", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["same"], found["failed"]) == (True, "")
    assert [each["call"] for each in found["steps"]] == ["fit", "evaluate", "predict"]
    assert all(each["dtypes"] == ["float64"] for each in found["steps"])


@pytest.mark.slow
def test_two_workers_are_launched(tmp_path, compare):
    (tmp_path / "train.py").write_text(TEMPLATE)
    done = compare("--workers=2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same, but for rounding: " in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_parameter_servers_are_launched(tmp_path, compare):
    options = "parameter_server=toolkit.strategies.ParameterServerOptions(synchronous=True)"
    (tmp_path / "train.py").write_text(SCRIPT.replace("create()", f"create({options})"))
    done = compare("--ps=1", "--workers=2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 3 steps (fit, evaluate, predict), in float32." in done.stdout


OWN_LOOP = """
import keras, numpy as np, tensorflow as tf, toolkit

strategy = toolkit.strategies.create()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.random.default_rng(0).normal(size=(9, 6)).astype("float32"), np.arange(9) % 3
if "CALL" == "train_on_batch":
    train = model.train_on_batch
else:
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.reduce_sum(losses) / 9.0
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    @tf.function
    def replicated(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    data = tf.data.Dataset.from_tensors((x, y))
    (batch,) = strategy.experimental_distribute_dataset(data)
    train = lambda *_: replicated(batch)
count = 0
try:
    while count < 10**6:
        for _ in range(99):
            count += 1
            loss = float(train(x, y))
        assert model.predict_on_batch(x[: 1 + count % 7]).shape == (1 + count % 7, 3)
        model.test_on_batch(x, y)
        model.predict_on_batch(x)
finally:
    print("CALLS", count, "STEPS", int(optimizer.iterations))
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["train_on_batch", "the loop"])
def test_a_loop_of_a_scripts_own_is_ended(tmp_path, compare, call):
    (tmp_path / "train.py").write_text(OWN_LOOP.replace("CALL", call, 1))
    done = compare("train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"of 3 steps ({call}, predict_on_batch, test_on_batch), in float32." in done.stdout
    assert "The script's own calls went on, and it was ended in predict_on_batch (train.py, line " in done.stdout
    (counted,) = [line.split() for line in done.stdout.splitlines() if line.startswith("CALLS")]
    assert 400 < int(counted[1]) < 1500
    assert int(counted[3]) < 4


@pytest.mark.slow
def test_a_script_that_fails_or_has_no_strategy_ends_in_2(tmp_path, compare):
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    done = compare("train.py")
    assert (done.returncode, "The script failed: ValueError: no data." in done.stdout) == (2, True), done.stdout
    (tmp_path / "train.py").write_text("print('done')")
    done = compare("train.py")
    assert (done.returncode, "Nothing was compared" in done.stdout) == (2, True), done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "it needs a script to run"),
        (["none.py"], "there is no file none.py"),
        (["--gpus=1", "none.py"], "it must be at least 2"),
    ],
)
def test_what_cannot_be_compared_is_said(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
