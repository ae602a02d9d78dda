import json

import pytest

from toolkit.cluster import Cluster, Task, check, parse
from toolkit.errors import ClusterError

GOOD = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}


SERVED = {"chief": ["c:1"], "ps": ["d:1"]}


def config(cluster=None, **task):
    return json.dumps({"cluster": cluster or GOOD["cluster"], "task": {**GOOD["task"], **task}})


def of(cluster):
    return json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})


# what is given, the place, a word of what is found, a word of the cure
BAD = [
    (None, "line 1, column 1", "nothing at all", '"cluster"'),
    ("", "line 1, column 1", "nothing at all", '"cluster"'),
    (" \n", "line 1, column 1", "nothing at all", '"cluster"'),
    ("[]", "line 1, column 1", "a list, not an object", '"cluster"'),
    ("null", "line 1, column 1", "null, not an object", '"cluster"'),
    ("7", "line 1, column 1", "7, not an object", '"cluster"'),
    ("{\n  'cluster': 1}", "line 2, column 3", "isn't JSON", "double quotes"),
    ("{cluster:{worker:[a:1]}}", "line 1, column 2", "isn't JSON", "single quotes around the whole"),
    ('{"cluster": {"worker": ["a:1"]}', "line 1, column 32", "ends too early", "closing braces"),
    ('{"cluster": {"worker": ["a:1",]}}', "line 1, column", "followed by nothing", "Remove the comma"),
    ('{"a": 1} {"b": 2}', "line 1, column 10", "more follows", "Remove what follows"),
    ('{"a" 1}', "line 1, column 6", "isn't JSON", "double quotes"),
    ("\ufeff{}", "line 1, column 1", "isn't JSON", "Correct it"),
    ("[" * 100_000, "line 1, column 1", "too large", '"cluster"'),
    ('{"a": ' + "1" * 5000 + "}", "line 1, column 1", "too large", '"cluster"'),
    ('{"cluster":{"worker":["a:1"],"worker":["b:1"]}}', "cluster.worker", "more than once", "Keep one"),
    ('{"task":{"index":0,"index":1}}', "task.index", "more than once", "Keep one"),
    ('{"task":1,"task":2}', "task", "more than once", "Keep one"),
    ('{"rest":[0,{"a":1,"a":2}]}', "rest[1].a", "more than once", "Keep one"),
    ("{}", "cluster", "missing", "worker"),
    ("{}", "task", "missing", "of this process"),
    ('{"cluster": []}', "cluster", "a list, not an object", "worker"),
    ('{"cluster": {}}', "cluster", "no job", "worker"),
    ('{"task": []}', "task", "a list, not an object", "index"),
    ('{"task": {}}', "task.type", "missing", "index"),
    ('{"task": {}}', "task.index", "missing", "index"),
    (of({"coordinator": ["a:1"]}), "cluster.coordinator", "no job 'coordinator'", "Call it chief"),
    (of({"workers": ["a:1"]}), "cluster.workers", "no job", "Did you mean worker"),
    (of({"parameter_server": ["a:1"]}), "cluster.parameter_server", "no job", "Call it ps"),
    (of({"x y": ["a:1"]}), "cluster['x y']", "no job", "chief, worker, ps, evaluator"),
    (of({"worker": []}), "cluster.worker", "empty", "leave the job out"),
    (of({"worker": {}}), "cluster.worker", "empty", "leave the job out"),
    (of({"worker": "a:1"}), "cluster.worker", "'a:1', not a list", "also for one task"),
    (of({"worker": 1}), "cluster.worker", "1, not a list", "HOST:PORT"),
    (of({"worker": None}), "cluster.worker", "null, not a list", "HOST:PORT"),
    (of({"worker": {"x": "a:1"}}), "cluster.worker['x']", "not a number", "from 0 on"),
    (of({"worker": {"-1": "a:1"}}), "cluster.worker['-1']", "negative", "from 0 on"),
    (of({"worker": {"1.5": "a:1"}}), "cluster.worker['1.5']", "whole", "from 0 on"),
    (of({"worker": [1]}), "cluster.worker[0]", "1, not a text", "in quotes"),
    (of({"worker": ["a:1", None]}), "cluster.worker[1]", "null, not a text", "in quotes"),
    (of({"worker": {"4": "a"}}), "cluster.worker[4]", "port is missing", "a:2222"),
    (of({"worker": [" a:1"]}), "cluster.worker[0]", "white space around", "Remove"),
    (of({"worker": ["a:1\t"]}), "cluster.worker[0]", "white space around", "Remove"),
    (of({"worker": ["a: 1"]}), "cluster.worker[0]", "white space inside", "Remove"),
    (of({"worker": ["a"]}), "cluster.worker[0]", "port is missing", "host:port"),
    (of({"worker": ["a:0"]}), "cluster.worker[0]", "no port 0", "1 to 65535"),
    (of({"worker": ["a:65536"]}), "cluster.worker[0]", "no port 65536", "1 to 65535"),
    (of({"worker": ["a:http"]}), "cluster.worker[0]", "not a number", "1 to 65535"),
    (of({"worker": ["http://a:1"]}), "cluster.worker[0]", "'http://'", "without a scheme"),
    (of({"worker": ["grpc://a:1"]}), "cluster.worker[0]", "'grpc://'", "without a scheme"),
    (of({"worker": ["::1:22"]}), "cluster.worker[0]", "without brackets", "[::1]:22"),
    (of({"worker": [":22"]}), "cluster.worker[0]", "host before the port is empty", "host:port"),
    (of({"worker": [""]}), "cluster.worker[0]", "empty", "host:port"),
    (of({"worker": ["a:1", "a:1"]}), "cluster.worker[1]", "worker:0 has the address", "its own"),
    (of({"worker": ["localhost:1", "127.0.0.1:1"]}), "cluster.worker[1]", "worker:0 has", "its own"),
    (of({"worker": ["A.b:1", "a.B:1"]}), "cluster.worker[1]", "worker:0 has", "its own"),
    (of({"worker": ["a:1"], "chief": ["c:1"], "ps": ["a:1"]}), "cluster.ps[0]", "worker:0 has", "its own"),
    (of({"chief": ["a:1"], "worker": ["a:1", "b:1"]}), "cluster.worker[0]", "chief:0 has", "Leave it out of worker"),
    (of({"worker": ["a:1"], "evaluator": ["a:1"]}), "cluster.evaluator[0]", "train together", "its own"),
    (of({"chief": ["a:1", "b:1"]}), "cluster.chief", "2 tasks", "make the others workers"),
    (of({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}), "cluster.evaluator", "2 tasks", "at most one"),
    (of({"ps": ["a:1"], "worker": ["b:1"]}), "cluster.chief", "no chief", "Add"),
    (of({"ps": ["a:1"], "chief": ["b:1"]}), "cluster.worker", "no task trains", "Add"),
    (of({"ps": ["a:1"]}), "cluster.worker", "no task trains", "Add"),
    (of({"evaluator": ["a:1"]}), "cluster", "no task trains", "Add"),
    (config(type="master"), "task.type", "no job 'master'", "Call it chief"),
    (config(type="worke"), "task.type", "no job", "Did you mean worker"),
    (config(type=None), "task.type", "no job null", "The jobs are"),
    (config(type=["worker"]), "task.type", "no job a list", "The jobs are"),
    (config(type="ps"), "task.type", "cluster has no ps", "choose one of worker"),
    (config(index=-1), "task.index", "negative", "from 0 on"),
    (config(index="-1"), "task.index", "negative", "from 0 on"),
    (config(index=1.5), "task.index", "whole", "from 0 on"),
    (config(index=1.0), "task.index", "whole", "from 0 on"),
    (config(index=float("nan")), "task.index", "whole", "from 0 on"),
    (config(index=True), "task.index", "true is not a number", "from 0 on"),
    (config(index=None), "task.index", "null is not a number", "from 0 on"),
    (config(index="one"), "task.index", "'one' is not a number", "from 0 on"),
    (config(index=[0]), "task.index", "a list is not a number", "from 0 on"),
    (config(index=10**30), "task.index", "too large", "from 0 on"),
    (config(index=2), "task.index", "the cluster has no worker:2", "0 to 1"),
    (config({"worker": {"1": "a:1", "5": "b:1"}, **SERVED}, index=0), "task.index", "the cluster has no", "1, 5"),
    (config({"worker": {"0": "a:1", "2": "b:1"}}, index=2), "cluster.worker", "worker:1 isn't", "without gaps"),
    (config({"chief": ["a:1"], "worker": {"2": "b:1"}}, index=2), "cluster.worker", "worker:0 isn't", "without gaps"),
    (
        json.dumps({"sparseCluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 0}}),
        "cluster",
        "sparseCluster instead",
        "enableDynamicWorker",
    ),
    (config({"chief": ["a:1"]}, type="chief", index=1), "task.index", "the cluster has no chief:1", "from 0,"),
]


@pytest.mark.parametrize(("text", "place", "found", "cure"), BAD)
def test_each_mistake_is_told_with_its_place_and_its_cure(text, place, found, cure):
    problems = check(text).problems
    assert any(p.place.startswith(place) and found in p.found and cure in p.cure for p in problems), problems
    with pytest.raises(ClusterError):
        parse(text, source="TF_CONFIG")


@pytest.mark.parametrize(
    "text",
    [text for text, place, *_ in BAD if place.startswith(("cluster.", "task.")) and text.startswith('{"cluster')],
)
def test_one_mistake_is_told_once(text):
    double = ('"worker":["a:1"],"worker"', '"ps": ["a:1"]}, ', '"parameter_server"')
    if not any(each in text for each in double):  # These miss something else as well.
        assert len(check(text).problems) == 1


def test_everything_wrong_is_told_in_one_go():
    text = json.dumps(
        {
            "cluster": {"worker": ["http://a:1", "b", " c:1"], "chief": ["d:0"], "pss": {"x": "e:1"}},
            "task": {"type": "worker", "index": 9},
        }
    )
    places = [problem.place for problem in check(text).problems]
    assert places == [
        *["cluster.worker[0]", "cluster.worker[1]", "cluster.worker[2]", "cluster.chief[0]"],
        *["cluster.pss", "cluster.pss['x']", "task.index"],
    ]


@pytest.mark.parametrize(
    ("text", "task"),
    [
        (config(), Task("worker", 0)),
        (config(index="1"), Task("worker", 1)),
        (config({"worker": {"3": "a:1"}}, index=3), Task("worker", 3)),
        (config({"chief": ["a:1"]}, type="chief"), Task("chief", 0)),
        (config(type="evaluator"), Task("evaluator", 0)),
        (config({"worker": ["[::1]:1", "127.0.0.1:2", "host_name:3"]}), Task("worker", 0)),
        (json.dumps({**GOOD, "rpc_layer": "grpc", "environment": "cloud", "extra": [1]}), Task("worker", 0)),
    ],
)
def test_what_tensorflow_takes_is_taken(text, task):
    checked = check(text)
    assert not checked.problems
    assert checked.task == task
    assert checked.cluster


def test_a_file_for_all_tasks_needs_no_task():
    text = json.dumps({"cluster": GOOD["cluster"]})
    checked = check(text, task_required=False)
    assert (checked.cluster, checked.task, checked.problems) == (Cluster(GOOD["cluster"]), None, ())
    assert check(text).problems


def test_what_is_sound_is_there_beside_what_is_wrong():
    assert check(config(index=7)).cluster == Cluster(GOOD["cluster"])
    assert check(config({"worker": ["a"]})).task == Task("worker", 0)
    with pytest.raises(ClusterError, match="port is missing"):
        check(config({"worker": ["a"]})).sound  # noqa: B018


def test_the_error_has_a_line_for_each_problem():
    with pytest.raises(ClusterError) as caught:
        parse(config({"worker": ["a", "b:0"]}, index=5), source="TF_CONFIG")
    lines = str(caught.value).splitlines()
    assert lines[0] == "read a cluster from TF_CONFIG, but it has 3 mistakes. Correct these:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  cluster.worker[0]", "  cluster.worker[1]", "  task.index"]
    assert not str(caught.value).endswith("..")


def test_the_error_stays_readable_where_thousands_of_things_are_wrong():
    with pytest.raises(ClusterError, match="And 9,950 more"):
        parse(of({"worker": ["x"] * 10_000}), source="TF_CONFIG")
    assert len(check(of({"worker": ["x"] * 10_000})).problems) == 10_000


def test_a_master_is_taken_as_chief():
    text = '{"cluster": {"master": ["a:1"], "worker": ["b:1"]}, "task": {"type": "master", "index": 0}}'
    found = check(text)
    assert found.problems == ()
    assert found.sound.as_dict() == {"chief": ["a:1"], "worker": ["b:1"]}
    assert str(found.task) == "chief:0"
    assert "counts as its chief" in found.notes[0]


@pytest.mark.parametrize(
    ("layer", "wrong"), [("grpc", False), (None, False), ("", False), ("grpc+verbs", True), (7, True)]
)
def test_what_tasks_speak_is_grpc(layer, wrong):
    text = json.dumps({"cluster": {"worker": ["b:1"]}, "task": {"type": "worker", "index": 0}, "rpc_layer": layer})
    assert [problem.place for problem in check(text).problems] == ["rpc_layer"] * (layer in ("grpc+verbs", 7))
