import json

import pytest

from toolkit.cluster import Cluster, Task, discover
from toolkit.errors import ClusterError

TWO = Cluster({"worker": ["a:1", "b:1"]})
TF_CONFIG = {"TF_CONFIG": TWO.tf_config(Task("worker", 1))}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_DISTRIBUTION": "block",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
# Two ranks on a, then one on b: this is the one on b.
MPI_TWO_HOSTS = {
    **MPI,
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "TOOLKIT_HOSTS": "a:2,b",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "TOOLKIT_CLUSTER": '{"worker": ["cifar-0.cifar:2222", "cifar-1.cifar:2222"]}',
}


def hosts(membership):
    return [membership.cluster.address(task).rpartition(":")[0] for task in membership.cluster.tasks]


def ports(membership):
    return [int(membership.cluster.address(task).rpartition(":")[2]) for task in membership.cluster.tasks]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": {"worker": ["x:1", "y:1"]}}))
    return path


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": " "},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"environment": "cloud", "rpc_layer": "grpc"}'},
        {"TF_CONFIG": " { }\n"},
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # A batch script, outside a step.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # A shell that salloc started.
        {**MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
        {"TOOLKIT_CLUSTER": '{"worker": ["a:1"]}', "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_nothing_given_is_no_cluster(environ):
    assert discover(environ) is None


def test_tf_config_says_cluster_and_task():
    found = discover(TF_CONFIG)
    assert (found.cluster, found.task, found.source) == (TWO, Task("worker", 1), "TF_CONFIG")


def test_tf_config_goes_before_any_launcher():
    assert discover({**TF_CONFIG, **SLURM, **MPI, **KUBERNETES}).source == "TF_CONFIG"


def test_an_empty_tf_config_lets_the_launcher_speak():
    assert discover({"TF_CONFIG": "{}", **SLURM}).source == "Slurm step 12.0"


@pytest.mark.parametrize("text", ['{"task": {"type": "worker", "index": 0}}', '{"cluster": {}}', "[]", "x"])
def test_a_tf_config_that_says_something_else_is_an_error(text):
    with pytest.raises(ClusterError, match="read a cluster from TF_CONFIG"):
        discover({"TF_CONFIG": text, **SLURM})


def test_a_task_given_goes_before_the_one_in_tf_config():
    assert discover(TF_CONFIG, task="worker:0").task == Task("worker", 0)


def test_a_task_alone_is_no_cluster():
    with pytest.raises(ClusterError, match="neither a file nor TF_CONFIG"):
        discover(SLURM, task="worker:0")


def test_a_file_goes_before_everything(file):
    found = discover({**TF_CONFIG, **SLURM}, file=file, task="worker:0")
    assert found.cluster == Cluster({"worker": ["x:1", "y:1"]})
    assert (found.task, found.source) == (Task("worker", 0), str(file))


def test_the_task_of_a_file_for_all_comes_from_tf_config(file):
    assert discover(TF_CONFIG, file=file).task == Task("worker", 1)
    only_task = {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'}
    assert discover(only_task, file=file).task == Task("worker", 1)


def test_a_file_may_name_the_task_itself(file):
    file.write_text("\ufeff" + TWO.tf_config(Task("worker", 0)), encoding="utf-8")
    assert discover(TF_CONFIG, file=file).task == Task("worker", 0)


@pytest.mark.parametrize("environ", [{}, SLURM, {"TF_CONFIG": "x"}, {"TF_CONFIG": "{}"}])
def test_a_file_without_a_task_lists_those_to_choose_from(file, environ):
    with pytest.raises(ClusterError, match="which of them this process is.*worker:0, worker:1"):
        discover(environ, file=file)


@pytest.mark.parametrize(("task", "message"), [("worker:2", "worker:0, worker:1"), ("ps", "index"), ("x:0", "no job")])
def test_a_task_that_the_file_has_not_is_refused(file, task, message):
    with pytest.raises(ClusterError, match=message):
        discover({}, file=file, task=task)


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("nowhere", "No such file"), ("binary", "UTF-8"), (".", "directory")):
        with pytest.raises(ClusterError, match=message):
            discover({}, file=tmp_path / name)


def test_every_task_of_an_srun_step_is_a_worker():
    found = discover(SLURM)
    assert hosts(found) == ["n1", "n1", "n2"]
    assert (found.task, found.source) == (Task("worker", 2), "Slurm step 12.0")


def test_all_tasks_of_a_step_find_the_same_cluster():
    places = [("0", "0"), ("0", "1"), ("1", "0")]
    found = {
        discover({**SLURM, "SLURM_PROCID": str(i), "SLURM_NODEID": node, "SLURM_LOCALID": local}).cluster
        for i, (node, local) in enumerate(places)
    }
    assert len(found) == 1


def test_steps_and_jobs_that_may_share_a_node_get_other_ports():
    seen = []
    for job, step in (("12", "0"), ("12", "1"), ("14", "0")):
        seen += ports(discover({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}))
    assert len(set(seen)) == 9
    assert all(20000 <= port < 30000 for port in seen)


def test_cyclic_distribution_deals_the_ranks_out():
    cyclic = {**SLURM, "SLURM_DISTRIBUTION": "cyclic:block", "SLURM_STEP_TASKS_PER_NODE": "3,1,2"}
    cyclic |= {"SLURM_STEP_NODELIST": "a,b,c", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5", "SLURM_NODEID": "0"}
    assert hosts(discover({**cyclic, "SLURM_LOCALID": "2"})) == ["a", "b", "c", "a", "c", "a"]


@pytest.mark.parametrize("way", ["", "block:cyclic", "block,NoPack", "*", "plane=1"])
def test_other_distributions_fill_one_node_after_another(way):
    one_each = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_NODEID": "2"}
    assert hosts(discover({**one_each, "SLURM_DISTRIBUTION": way})) == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "x"}, "no number"),
        ({"SLURM_PROCID": "3"}, "this is task 3"),
        ({"SLURM_STEP_NUM_TASKS": "two"}, "no number"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "counts 3"),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, "3 nodes"),
        ({"SLURM_STEP_NODELIST": ""}, "not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "x"}, "list of counts"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "--distribution=block"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "--distribution=block"),
        ({"SLURM_NODEID": "0"}, "number 0 on node 0"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "number 1 on node 0"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        discover({**SLURM, **changes})


def test_inside_mpirun_the_step_is_one_of_its_daemons_and_not_asked():
    assert discover({**SLURM, **MPI}).source == "Open MPI, 3 ranks"


def test_ranks_on_one_host_meet_on_loopback():
    found = discover(MPI)
    assert hosts(found) == ["127.0.0.1"] * 3
    assert len(set(ports(found))) == 3
    assert (found.task, found.source) == (Task("worker", 1), "Open MPI, 3 ranks")
    assert ports(discover({**MPI, "PMIX_NAMESPACE": "prterun-host-78@1"})) != ports(found)


@pytest.mark.parametrize("given", ["a:2,b", " a:2 , b:1 ", "a,a,b"])
def test_ranks_on_several_hosts_are_where_the_user_says(given):
    found = discover({**MPI_TWO_HOSTS, "TOOLKIT_HOSTS": given})
    assert hosts(found) == ["a", "a", "b"]
    assert found.task == Task("worker", 2)


def test_hosts_may_be_ipv6_addresses():
    assert hosts(discover({**MPI_TWO_HOSTS, "TOOLKIT_HOSTS": "[fd00::1]:2,[fd00::2]"}))[1:] == [
        "[fd00::1]",
        "[fd00::2]",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TOOLKIT_HOSTS": ""}, "mpirun -x TOOLKIT_HOSTS="),
        ({"TOOLKIT_HOSTS": "a:2"}, "3 ranks"),
        ({"TOOLKIT_HOSTS": "a,b:2"}, "number 1 of 2 on b"),
        ({"TOOLKIT_HOSTS": "a:x,b"}, "neither a host"),
        ({"TOOLKIT_HOSTS": "a:2,"}, "neither a host"),
        ({"TOOLKIT_HOSTS": "a:2,b c"}, "white space inside"),
        ({"OMPI_COMM_WORLD_RANK": ""}, "not set"),
        ({"OMPI_COMM_WORLD_RANK": "9"}, "rank 9"),
        ({"OMPI_COMM_WORLD_SIZE": "-3"}, "no number"),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        discover({**MPI_TWO_HOSTS, **changes})


def test_ranks_may_be_other_jobs():
    found = discover({**SLURM, "TOOLKIT_TASKS": "chief:1,worker:1,ps:1"})
    assert [str(task) for task in found.cluster.tasks] == ["chief:0", "worker:0", "ps:0"]
    assert found.task == Task("ps", 0)
    assert hosts(found) == ["n1", "n1", "n2"]
    assert discover({**MPI, "TOOLKIT_TASKS": "chief:1,worker:2"}).task == Task("worker", 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("boss:2", "isn't a job and a number"),
        ("worker", "isn't a job"),
        ("worker:x", "isn't a job"),
        ("worker:1", "3 were started"),
    ],
)
def test_jobs_of_ranks_that_cannot_be(given, message):
    with pytest.raises(ClusterError, match=message):
        discover({**MPI, "TOOLKIT_TASKS": given})


def test_a_pod_of_an_indexed_job_is_a_worker():
    found = discover(KUBERNETES)
    assert found.cluster == Cluster({"worker": ["cifar-0.cifar:2222", "cifar-1.cifar:2222"]})
    assert (found.task, found.source) == (Task("worker", 1), "Kubernetes, pod 1")


def test_pods_of_several_jobs_are_numbered_through_or_by_job():
    cluster = {"ps": ["d:1"], "worker": ["b:1", "c:1"], "chief": ["a:1"]}
    environ = {"TOOLKIT_CLUSTER": json.dumps(cluster)}
    tasks = [discover({**environ, "JOB_COMPLETION_INDEX": str(index)}).task for index in range(4)]
    assert list(map(str, tasks)) == ["chief:0", "worker:0", "worker:1", "ps:0"]
    found = discover({**environ, "JOB_COMPLETION_INDEX": "1", "TOOLKIT_TASK": "worker"})
    assert (found.task, found.source) == (Task("worker", 1), "Kubernetes, pod 1 of worker")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TOOLKIT_CLUSTER": "{"}, "it isn't JSON"),
        ({"TOOLKIT_CLUSTER": "[]"}, "TOOLKIT_CLUSTER"),
        ({"JOB_COMPLETION_INDEX": "2"}, "completions and parallelism"),
        ({"TOOLKIT_TASK": "boss"}, "0 tasks of job boss"),
        ({"JOB_COMPLETION_INDEX": "two"}, "no number"),
        ({"TOOLKIT_CLUSTER": '{"worker": ["a b:1", "c:1"]}'}, "white space"),
    ],
)
def test_a_manifest_that_says_only_part_is_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        discover({**KUBERNETES, **changes})
