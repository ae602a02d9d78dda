"""TensorFlow reaches its peers through a web proxy if one is set, and waits for ever: so none is in the way."""

import processes
import pytest

from toolkit.cluster import Cluster, without_proxies

CLUSTER = Cluster({"worker": ["10.0.0.1:1", "b.example.org:1"]})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"http_proxy": ""},
        {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/8,example.org"},
        {"https_proxy": "http://p:1", "no_proxy": "nothing", "no_grpc_proxy": "10.0.0.1, .example.org"},
    ],
)
def test_no_proxy_in_the_way(environ):
    assert without_proxies(CLUSTER, environ) == {}


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_what_was_excepted_stays_so(name):
    environ = {name: "http://proxy:3128", "no_proxy": "10.0.0.1,intranet"}
    added = without_proxies(CLUSTER, environ)
    assert added == {"no_grpc_proxy": "10.0.0.1,intranet,b.example.org"}
    assert without_proxies(CLUSTER, {**environ, **added}) == {}


def test_a_range_that_is_none_covers_nothing():
    assert without_proxies(CLUSTER, {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/99,nonsense/8"})


TRAIN = """
import keras
import numpy as np
import toolkit
strategy = toolkit.strategies.create()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
print("trained", strategy.num_replicas_in_sync)
"""


@pytest.mark.slow
def test_workers_started_by_hand_train_where_a_proxy_is_set(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_grpc_proxy": ""}
    with processes.group(["train.py"], [[], []], tmp_path, **proxy) as group:
        assert all("trained 2" in output for output in group.succeed(limit=90))
