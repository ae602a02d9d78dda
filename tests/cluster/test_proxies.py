"""TensorFlow reaches its peers through a web proxy if one is set, and waits for ever."""

import pytest

from toolkit.cluster import Cluster, check_proxies, without_proxies
from toolkit.errors import ClusterError

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
    check_proxies(CLUSTER, environ)
    assert without_proxies(CLUSTER, environ) == {}


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_in_the_way_is_said_and_mended(name):
    environ = {name: "http://proxy:3128", "no_proxy": "10.0.0.1,intranet"}
    with pytest.raises(ClusterError, match=f"{name} is set.*b.example.org.*no_grpc_proxy=10.0.0.1,intranet,b.example"):
        check_proxies(CLUSTER, environ)
    check_proxies(CLUSTER, {**environ, **without_proxies(CLUSTER, environ)})


def test_a_range_that_is_none_covers_nothing():
    with pytest.raises(ClusterError):
        check_proxies(CLUSTER, {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/99,nonsense/8"})
