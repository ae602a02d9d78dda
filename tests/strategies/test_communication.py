"""NCCL where each replica has a GPU of its own: what is chosen and told TensorFlow; and nobody connects twice."""

import json

import processes
import pytest

from toolkit.errors import StrategyError
from toolkit.strategies.step.collectives import choose

HOSTS = ("a:1", "b:1")
ONE_HOST = ("a:1", "a:2")


@pytest.mark.parametrize(
    ("asked", "gpus", "addresses", "environ", "kind", "why"),
    [
        ("auto", [1, 1], HOSTS, {}, "nccl", ""),
        ("auto", [1], ONE_HOST, {"CUDA_VISIBLE_DEVICES": "1"}, "nccl", ""),
        ("auto", [1], ONE_HOST, {}, "ring", "2 workers on a may use the same GPUs"),
        ("auto", [], HOSTS, {}, "ring", "no GPU"),
        ("auto", [2], HOSTS, {}, "ring", "split"),
        ("ring", [1], HOSTS, {}, "ring", "was set"),
        ("nccl", [1], ONE_HOST, {}, "nccl", ""),
    ],
)
def test_what_is_chosen(asked, gpus, addresses, environ, kind, why):
    found = choose(asked, gpus=gpus, addresses=addresses, own="a:1", environ=environ)
    assert found[0] == kind
    assert why in found[1]
    assert bool(why) == bool(found[1])


@pytest.mark.parametrize(("asked", "gpus"), [("nccl", []), ("nccl", [2]), ("tcp", [1])])
def test_what_can_not_be_is_said(asked, gpus):
    with pytest.raises(StrategyError, match=f"communication='{asked}'"):
        choose(asked, gpus=gpus, addresses=HOSTS, own="a:1", environ={})


# What it comes to on GPUs can be seen without one: TensorFlow puts the hint and the token into the graph, and takes
# the ring on CPU devices.
SEEN = """
import json, sys
import tensorflow as tf
import toolkit
from toolkit.strategies import multi_worker
from toolkit.support import status
told, report = {}, status.report
status.report = lambda **facts: (told.update(facts), report(**facts))
kind = {"nccl": tf.distribute.experimental.CommunicationImplementation.NCCL}.get(sys.argv[1])
options = tf.distribute.experimental.CommunicationOptions(implementation=kind) if kind else None
strategy = multi_worker.MultiWorkerStrategy(communication_options=options)
import keras, numpy
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), toolkit.parallel.ShardedDense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((numpy.ones((8, 6), "f"), numpy.ones((8, 1), "f"))).repeat(3)
model.fit(data, verbose=0)
@tf.function
def step(iterator):
    return strategy.run(model.train_step, args=(next(iterator),))
iterator = iter(strategy.experimental_distribute_dataset(data))
graph = step.get_concrete_function(iterator).graph
hints, tokens = set(), set()
for operation in graph.get_operations():
    if operation.type.startswith("Collective"):
        hints.add(operation.get_attr("communication_hint").decode())
        tokens.add(tuple(tensor.name for tensor in operation.inputs if tensor.dtype == tf.resource))
again = multi_worker.MultiWorkerStrategy()
with again.scope():
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
other.fit(data, verbose=0)
said = toolkit.strategies.describe(strategy)["communication"]
seen = {"hints": sorted(hints), "tokens": sorted(tokens), "same": again is strategy, "said": said}
seen["told"] = told["communication"]
print("SEEN", json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "nccl"])
def test_what_tensorflow_is_told_and_a_second_strategy_is_the_first(tmp_path, kind):
    (tmp_path / "it.py").write_text(SEEN)
    done = processes.launch(tmp_path, "it.py", kind, tasks=("--workers=2", "--show=worker:0"), limit=90)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.partition("SEEN ")[2].splitlines()[0])
    assert seen["same"]
    if kind == "nccl":
        assert seen["hints"] == ["nccl"]
        assert len(seen["tokens"]) == 1
        assert seen["tokens"][0]
        assert (seen["said"], seen["told"]) == ("nccl", "nccl")
    else:
        assert "nccl" not in seen["hints"]
        assert (seen["said"], seen["told"]) == ("ring", "ring")
