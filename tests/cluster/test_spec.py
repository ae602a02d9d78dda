import itertools
import json
import sys
import time
import tracemalloc

import limits
import pytest
from clusters import clusters
from hypothesis import given

from toolkit.cluster import Cluster, Task, parse
from toolkit.errors import ClusterError

FOUR = {"ps": ["p:1"], "worker": ["a:1", "b:1"], "evaluator": ["e:1"], "chief": ["c:1"]}


def test_a_task_is_written_as_job_and_index():
    assert str(Task("worker", 1)) == "worker:1"
    assert Task.parse("ps:12") == Task("ps", 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no job ''"),
        ("master:0", "Call it chief"),
        ("workr:0", "Did you mean worker"),
        ("worker", "index is missing"),
        ("worker:", "not a number"),
        ("worker:-1", "negative"),
        ("worker:1.5", "whole"),
        ("worker:01", "not a number"),
        ("worker:" + "9" * 5000, "not a number"),
    ],
)
def test_what_is_no_task_is_refused(text, message):
    with pytest.raises(ClusterError, match=message):
        Task.parse(text)


def test_tasks_come_in_tensorflows_order_whatever_the_order_given():
    cluster = Cluster(FOUR)
    assert [str(t) for t in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    assert cluster.address(Task("worker", 1)) == "b:1"
    assert cluster.chief == Task("chief", 0)
    assert Task("ps", 0) in cluster
    assert Task("ps", 1) not in cluster


def test_chief_and_workers_train_together_the_chief_first():
    cluster = Cluster({job: FOUR[job] for job in ("worker", "chief", "evaluator")})
    assert [str(t) for t in cluster.synchronous] == ["chief:0", "worker:0", "worker:1"]


def test_nobody_is_in_step_beside_parameter_servers():
    assert Cluster(FOUR).synchronous == ()


def test_without_a_chief_the_lowest_worker_is_it():
    assert Cluster({"worker": {"3": "a:1", "2": "b:1"}}).chief == Task("worker", 2)


def test_equal_clusters_are_equal_however_they_were_written():
    dense = Cluster({"worker": ["a:1", "b:1"]})
    sparse = Cluster({"worker": {"1": "b:1", 0: "a:1"}})
    assert dense == sparse
    assert hash(dense) == hash(sparse)
    assert dense.digest == sparse.digest
    assert dense.as_dict() == sparse.as_dict() == {"worker": ["a:1", "b:1"]}
    assert dense.digest != Cluster({"worker": ["b:1", "a:1"]}).digest


def test_a_job_with_gaps_stays_a_mapping():
    cluster = Cluster({"worker": {1: "b:1"}, "chief": ["c:1"]})
    assert cluster.as_dict() == {"chief": ["c:1"], "worker": {1: "b:1"}}
    assert json.loads(cluster.tf_config(Task("worker", 1)))["cluster"]["worker"] == {"1": "b:1"}


def test_a_cluster_cannot_be_changed_and_repr_makes_it_again():
    cluster = Cluster(FOUR)
    with pytest.raises(AttributeError):
        cluster.jobs = ()
    assert eval(repr(cluster)) == cluster


def test_a_wrong_cluster_cannot_be_made_and_all_its_faults_are_told():
    with pytest.raises(ClusterError, match=r"cluster\.worker\[0\](.|\n)*cluster\.worker\[1\]"):
        Cluster({"worker": ["a", "b:0"]})


def test_tf_config_is_compact():
    text = Cluster({"worker": ["a:1"]}).tf_config(Task("worker", 0))
    assert text == '{"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":0}}'


def test_a_task_that_is_not_there_is_refused_with_those_that_are():
    cluster = Cluster({"worker": ["a:1", "b:1", "c:1"], "chief": ["d:1"]})
    with pytest.raises(ClusterError, match="chief:0, worker:0 to worker:2"):
        cluster.tf_config(Task("worker", 3))
    with pytest.raises(ClusterError, match="no such task"):
        cluster.address(Task("ps", 0))


def test_an_evaluator_may_stand_outside_the_cluster():
    cluster = Cluster({"worker": ["a:1"]})
    assert parse(cluster.tf_config(Task("evaluator", 0)), source="x").task == Task("evaluator", 0)


@given(clusters())
def test_what_is_written_is_read_back(cluster):
    for task, text in cluster.tf_configs():
        found = parse(text, source="TF_CONFIG")
        assert (found.cluster, found.task) == (cluster, task)
        assert found.cluster.digest == cluster.digest


@given(clusters())
def test_tensorflow_reads_what_is_written_the_same_way(cluster):
    from tensorflow.python.distribute import multi_worker_util
    from tensorflow.train import ClusterSpec

    spec = ClusterSpec(json.loads(cluster.tf_config(cluster.chief))["cluster"])
    assert spec.as_dict() == cluster.as_dict()
    if cluster.chief.index == 0:
        assert multi_worker_util.is_chief(spec, cluster.chief.job, 0)
    assert sum(spec.num_tasks(job) for job in spec.jobs) == len(cluster.tasks)


@pytest.mark.slow
def test_ten_thousand_tasks_are_written_one_at_a_time():
    cluster = Cluster({"worker": [f"10.0.{i // 250}.{i % 250}:2222" for i in range(10_000)]})
    start = time.monotonic()
    total = sum(len(text) for _, text in cluster.tf_configs())
    seconds = time.monotonic() - start
    # Five hundredths of a second on two idle cores; the limit is against a change of order only.
    limits.keep(seconds, 20)
    tracemalloc.start()
    try:
        longest = 0
        for _, text in itertools.islice(Cluster(cluster.as_dict()).tf_configs(), 1000):
            longest = max(longest, sys.getsizeof(text))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 1e9
    # A few copies of one text and of the tasks, where a thousand texts would take 190 MB.
    assert peak < 60 * longest
