"""The script of Keras's and TensorFlow's own guides."""

import pathlib
import re

import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("keras_guide.py")
MAKING = "tf.distribute.MultiWorkerMirroredStrategy()"

pytestmark = pytest.mark.slow


def launch(folder, *flags):
    return processes.launch(folder, *flags, str(SCRIPT))


def accuracies(text):
    return [float(found) for found in re.findall(r"^(?:worker:\d \| )?accuracy ([\d.]+)$", text, re.MULTILINE)]


@pytest.mark.smoke
def test_it_runs_under_the_launcher_as_written(plain_starts, tmp_path):
    done = launch(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    first, second = accuracies(done.stdout)
    assert first == second > 0.9
    assert (tmp_path / "trained.keras").exists()
    assert "the launcher replaced tf.distribute.MultiWorkerMirroredStrategy" in done.stdout
    assert not list(tmp_path.glob("workertemp*"))


@pytest.mark.long
def test_the_experimental_name_of_earlier_tutorials(tmp_path):
    script = tmp_path / "earlier.py"
    script.write_text(
        "import json, os\nimport tensorflow as tf\n"
        "ring = tf.distribute.experimental.CollectiveCommunication.RING\n"
        "make = tf.distribute.experimental.MultiWorkerMirroredStrategy\n"
        "first = json.loads(os.environ['TF_CONFIG'])['task']['index'] == 0\n"
        "strategy = make(communication=ring) if first else make(ring)\n"
        "print('MADE', type(strategy).__name__, strategy.num_replicas_in_sync)\n"
    )
    done = processes.launch(tmp_path, str(script))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.count("MADE MultiWorkerStrategy 2") == 2


def test_as_is_leaves_it_alone(tmp_path):
    done = launch(tmp_path, "--as_is")
    assert done.returncode == 1
    assert "Attempt to convert a value (PerReplica" in done.stdout, (
        "Keras's fit no longer fails under MultiWorkerMirroredStrategy (keras-team/keras#20585). See whether "
        f"MultiWorkerStrategy.reduce is still needed.\n{done.stdout[-3000:]}"
    )
    assert "failed first" in done.stderr


@pytest.mark.long
def test_it_runs_by_hand_with_just_its_strategys_making_changed(plain_starts, tmp_path):
    text = SCRIPT.read_text()
    assert text.count(MAKING) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(MAKING, "__import__('toolkit').strategies.create('multi_worker')"))
    with processes.group([changed], [[], []], tmp_path) as group:
        first, second = group.succeed(limit=150)
    assert accuracies(first) == accuracies(second)
    assert accuracies(first)[0] > 0.9
