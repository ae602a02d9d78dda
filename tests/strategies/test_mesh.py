"""Groups of replicas: who exchanges with whom, and which cannot be."""

import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.mesh import Among, Mesh, in_one_group, mesh_of
from toolkit.strategies.step import collectives


def test_groups_are_neighbours_and_peers_have_the_same_shard():
    mesh = Mesh(shards=2, groups=3)
    assert [mesh.members(replica, Among.GROUP) for replica in (0, 1, 4)] == [[0, 1], [0, 1], [4, 5]]
    assert [mesh.members(replica, Among.PEERS) for replica in (0, 1, 4)] == [[0, 2, 4], [1, 3, 5], [0, 2, 4]]
    assert mesh.members(4, Among.ALL) == [0, 1, 2, 3, 4, 5]


def test_without_a_word_all_replicas_are_one_group(four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices)
    assert mesh_of(mirrored) == Mesh(4, 1)
    assert strategies.describe(mirrored)["mesh"] == {"shards": 4, "groups": 1}
    assert mesh_of(tf.distribute.get_strategy()) == Mesh(1, 1)


def test_what_was_asked_for_is_described_and_can_be_put_aside(four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices, shards=2)
    assert strategies.describe(mirrored)["mesh"] == {"shards": 2, "groups": 2}
    with in_one_group(mirrored):
        assert mesh_of(mirrored) == Mesh(4, 1)
    assert mesh_of(mirrored) == Mesh(2, 2)


@pytest.mark.parametrize(
    ("exchange", "group", "peers"),
    [
        (collectives.all_reduce, [3, 3, 7, 7], [4, 6, 4, 6]),
        (collectives.all_reduce_max, [2, 2, 4, 4], [3, 4, 3, 4]),
        (lambda x, among: collectives.all_gather(x, among=among)[1], [2, 2, 4, 4], [3, 4, 3, 4]),
        (
            lambda x, among: collectives.reduce_scatter(tf.stack([x, 10 * x]), among=among),
            [3, 30, 7, 70],
            [4, 6, 40, 60],
        ),
        (
            lambda x, among: collectives.all_to_all(tf.stack([x, 10 * x]), among=among)[0],
            [1, 10, 3, 30],
            [1, 2, 10, 20],
        ),
    ],
    ids=["all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all"],
)
def test_exchanges_stay_among_those_they_are_for(four_devices, exchange, group, peers):
    mirrored = strategies.create("mirrored", devices=four_devices, shards=2)

    @tf.function
    def step():
        def replica():
            own = tf.constant(1.0 + collectives.replica_id_and_count()[0])
            return exchange(own, among=Among.GROUP), exchange(own, among=Among.PEERS)

        return mirrored.run(replica)

    seen = [mirrored.experimental_local_results(value) for value in step()]
    assert np.array(seen).tolist() == [group, peers]


@pytest.mark.parametrize(
    ("name", "shards", "said"),
    [
        ("mirrored", 3, "4 replicas can't be divided into such groups. Give one of 1, 2, 4"),
        ("mirrored", 0, "a whole number of at least 1"),
        ("mirrored", True, "a whole number of at least 1"),
        ("mirrored", 2.0, "a whole number of at least 1"),
        ("one_device", 2, "there is one replica"),
    ],
)
def test_what_can_not_be_is_said(four_devices, name, shards, said):
    devices = four_devices if name == "mirrored" else four_devices[:1]
    with pytest.raises(StrategyError, match=said):
        strategies.create(name, devices=devices, shards=shards)
