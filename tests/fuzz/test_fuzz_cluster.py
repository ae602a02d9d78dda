"""What describes a cluster is a cluster, or one sentence about what is wrong: TF_CONFIG, files, node lists, launchers.

TOOLKIT_FUZZ_CASES says how many cases each test tries; see `fuzzing`.
"""

import contextlib
import json

import pytest
from fuzzing import ODD_TEXTS, Pairs, answered, damaged, dumped, fuzzed, refused, scalars, texts, values
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.cluster import Cluster, check, discover, load
from toolkit.cluster.discovery import expand, expand_counts, read_file
from toolkit.cluster.tf_config import JOBS

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # Hypothesis's, of 100 kB of text.

addresses = st.one_of(
    st.tuples(
        st.sampled_from(["a", "127.0.0.1", "127.0.0.2", "[::1]", "::1", "localhost", "http://a", "a b", "é", ""]),
        st.sampled_from(["", ":", ":0", ":1", ":2222", ":2223", ":65536", ":٣", ":" + "9" * 5000, ":1:2"]),
    ).map("".join),
    scalars,
)
jobs = st.one_of(st.sampled_from([*JOBS, "master", "Worker", "workers", "parameter_server"]), texts)
indices = st.one_of(st.sampled_from(["0", "1", "01", "-1", "1.5", "٣", "999999999", "9" * 5000]), texts)
tasks = st.one_of(
    st.lists(addresses, max_size=4), st.lists(st.tuples(indices, addresses), max_size=4).map(Pairs), values
)
clusters = st.one_of(st.lists(st.tuples(jobs, tasks), max_size=4).map(Pairs), values)
own = st.one_of(
    st.lists(
        st.one_of(st.tuples(st.just("type"), st.one_of(jobs, values)), st.tuples(st.just("index"), scalars)), max_size=3
    ).map(Pairs),
    values,
)
configs = st.lists(
    st.one_of(st.tuples(st.just("cluster"), clusters), st.tuples(st.just("task"), own), st.tuples(texts, values)),
    max_size=4,
).map(Pairs)
config_texts = st.one_of(damaged(configs.map(dumped)), texts)
LARGE = {
    "lists": '{"cluster":' + "[" * 100_000,
    "objects": '{"a":' * 50_000,
    "long names": '{"' + "a" * 100_000 + '": {"' + "b" * 50_000 + '": 1, "' + "b" * 50_000 + '": 2}}',
    "names in names": '{"aaaaaaaaaa":' * 900 + '{"b":1,"b":2}' + "}" * 900,
    "addresses": json.dumps({"cluster": {"worker": ["é é"] * 15_000}}),
    "one address": json.dumps({"cluster": {"worker": ["a:1"] * 20_000}}),
    "jobs": json.dumps({"cluster": {f"wrker{n}": [] for n in range(5_000)}}),
    "indices": json.dumps({"cluster": {"worker": {str(n): "a:1" for n in range(0, 30_000, 3)}}}),
    "job": json.dumps({"cluster": {"w" * 100_000: ["a:1"]}, "task": {"type": "w" * 100_000, "index": "1" * 100_000}}),
}


def told(text):
    """What is done with a TF_CONFIG from whichever place."""
    checked = check(text)
    for problem in checked.problems:
        assert problem.place
        assert problem.found
        assert problem.cure
    assert bool(checked.problems) == (checked.cluster is None or checked.task is None)
    with contextlib.suppress(ValueError):
        text.encode()  # An environment holds no others.
        discover({"TF_CONFIG": text})
    if checked.cluster is not None:
        assert Cluster(checked.cluster.as_dict()) == checked.cluster
        assert checked.cluster.digest
        for task, config in checked.cluster.tf_configs():
            assert check(config).task == task


@fuzzed()
@given(text=config_texts)
@example(text='{"cluster": {"worker": ["a:1"]}, "task": {"type": [], "index": 0}}')
def test_any_tf_config(text):
    with answered():
        told(text)


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_large_tf_configs(text):
    with answered():
        told(text)


@fuzzed()
@given(content=st.one_of(config_texts.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=60)))
def test_any_file(tmp_path, content):
    file = tmp_path / "cluster.json"
    file.write_bytes(content)
    with answered():
        load(file)
    for task in (None, "worker:0"):
        with answered():
            discover({}, file=file, task=task)


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_files_of_odd_names_and_tasks(tmp_path, name):
    with answered():
        read_file(tmp_path / name if name not in ("/",) else name)
    with answered():
        read_file(name)
    with answered():
        discover({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, task=name)
    with answered():
        discover({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, task=f"worker:{name}")


digits = st.sampled_from(["0", "1", "3", "07", "007", "10", "999", "99999", "999999999", "9" * 30, ""])
ranges = st.one_of(digits, st.tuples(digits, digits).map("-".join))
brackets = st.lists(ranges, max_size=3).map(lambda pieces: f"[{','.join(pieces)}]")
lists = st.one_of(
    damaged(
        st.lists(
            st.lists(st.one_of(brackets, st.sampled_from(["n", "gpu-", ".x", "é", "-", "[", "]", "(x3)"])), max_size=6)
            .map("".join),
            max_size=4,
        ).map(",".join)
    ),
    st.lists(st.tuples(digits, st.one_of(st.just(""), digits.map("(x{})".format))).map("".join), max_size=4).map(
        ",".join
    ),
    texts,
)  # fmt: skip


@fuzzed()
@given(text=lists)
@example(text="n[0-999999999]")
@example(text="n" + "[0]" * 2000)
@example(text="n" + "[0]" * 200 + "[0-99999]")
@example(text="n" * 100_000 + "[0-99999]")
@example(text="n" + "[0-1]" * 100)
@example(text="n[" + "1," * 50_000 + "1]")
@example(text="[" * 50_000 + "]" * 50_000)
def test_any_node_list(text):
    for expanded in (expand, expand_counts):
        with answered():
            assert len(expanded(text)) <= 100_000


counts = st.one_of(st.sampled_from(["0", "1", "2", "3", "١", "999999999999999999", "99999999", "9" * 5000]), texts)
SLURM = {
    "SLURM_STEP_ID": counts,
    "SLURM_JOB_ID": counts,
    "SLURM_STEP_NUM_TASKS": st.one_of(st.sampled_from(["2", "4", "9999990000", "100000"]), counts),
    "SLURM_PROCID": counts,
    "SLURM_NODEID": counts,
    "SLURM_LOCALID": counts,
    "SLURM_STEP_NODELIST": st.one_of(st.sampled_from(["n[0-1]", "a,b", "n[0-9999]", "n1"]), lists),
    "SLURM_STEP_TASKS_PER_NODE": st.one_of(st.sampled_from(["1(x2)", "2", "2(x2)", "999999(x10000)"]), lists),
    "SLURM_DISTRIBUTION": st.one_of(
        st.sampled_from(["block", "cyclic", "plane=2", "arbitrary", "cyclic:block"]), texts
    ),
}
TASKS = st.one_of(
    st.lists(st.tuples(jobs, counts).map(":".join), max_size=4).map(",".join),
    st.sampled_from(["chief:1,worker:1", "worker:99999," * 100 + "worker:1", "worker:0," * 40_000 + "worker:2"]),
)
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": st.one_of(st.sampled_from(["0", "1", "2", "100000000000"]), counts)
    for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
} | {
    "TOOLKIT_HOSTS": st.one_of(
        st.sampled_from(["a:2", "a,b", "[fd00::1]:2", "a:99999," * 200 + "b", "a:0," * 30_000 + "b"]), texts, lists
    ),
    "PMIX_NAMESPACE": texts,
}
KUBERNETES = {
    "TOOLKIT_CLUSTER": st.one_of(damaged(clusters.map(dumped)), st.just('{"worker": ["a:1", "b:1"]}'), texts),
    "TOOLKIT_TASK": st.one_of(jobs, st.just("worker")),
    "JOB_COMPLETION_INDEX": counts,
}


def environments(variables):
    """All of a launcher's variables, or all but some."""
    whole = st.fixed_dictionaries(variables, optional={"TOOLKIT_TASKS": TASKS})
    return whole | st.fixed_dictionaries({}, optional={**variables, "TOOLKIT_TASKS": TASKS})


SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "9999990000",
    "SLURM_STEP_NODELIST": "n[0-9999]",
    "SLURM_STEP_TASKS_PER_NODE": "999999(x10000)",
}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@fuzzed()
@given(environ=st.one_of(*map(environments, (SLURM, OPEN_MPI, KUBERNETES))))
@example(environ=SLURM_STEP)
@example(environ={**MPI, "OMPI_COMM_WORLD_SIZE": "9" * 12, "OMPI_COMM_WORLD_LOCAL_SIZE": "9" * 12})
@example(
    environ={
        **MPI,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "TOOLKIT_HOSTS": "a:99999," * 10_000 + "b",
    }
)
@example(
    environ={
        **MPI,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "TOOLKIT_TASKS": "worker:99999," * 10_000 + "worker:1",
    }
)
@example(environ={"TOOLKIT_CLUSTER": "[" * 100_000, "JOB_COMPLETION_INDEX": "0"})
@example(
    environ={
        "TOOLKIT_CLUSTER": '{"worker": ["a:1", "b:1"]}',
        "JOB_COMPLETION_INDEX": "0",
        "TOOLKIT_TASK": "x" * 100_000,
    }
)
def test_any_environment_of_a_launcher(environ):
    with answered():
        found = discover(environ)
        if found is not None:
            assert found.task in found.cluster


@fuzzed(0.2)
@given(environ=environments(OPEN_MPI), config=config_texts, task=st.one_of(st.none(), TASKS))
def test_whichever_comes_first_is_read(environ, config, task):
    with answered(), refused():
        discover({**environ, "TF_CONFIG": config}, task=task)
