"""Whatever stands on a command line is understood or refused in a sentence: recipes' flags, and `toolkit COMMAND`.

Nothing is started. TOOLKIT_FUZZ_CASES says how many cases each test tries; see `fuzzing`.
"""

import contextlib
import importlib
import io
import pathlib
import pkgutil
import socket
import subprocess

import pytest
from absl import flags
from fuzzing import answered, fuzzed, texts
from hypothesis import example, given
from hypothesis import strategies as st

import toolkit
from toolkit.cli import main, program
from toolkit.devices.setup import DeviceRequest

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # Hypothesis's, of 100 kB of text.


@pytest.fixture(scope="module")
def recipe():
    """The flags of a recipe that has them all; afterwards this process has none of them."""
    before = set(flags.FLAGS)
    importlib.import_module("recipes.cifar_parameter_server")
    yield sorted(set(flags.FLAGS) - before)
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """What would start something fails, and no name is looked up in a network."""

    def started(*_, **__):
        raise AssertionError("something was started")

    def numeric(host, port, *_, **__):
        return known(host, port, flags=socket.AI_NUMERICHOST)

    known = socket.getaddrinfo
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(socket, "getaddrinfo", numeric)
    monkeypatch.chdir(tmp_path)
    for name in ("it's.py", "-m", "-x.py"):
        pathlib.Path(name).write_text("")
    pathlib.Path("two.json").write_text('{"cluster": {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}}')
    pathlib.Path("bytes").write_bytes(b"--epochs=2\n\xff\n")
    pathlib.Path("itself").write_text("--flagfile=itself\n")


NAMES = (
    "gpus", "emulate", "visible_devices", "memory", "split_gpus", "inter_op_threads", "log_placement", "data",
    "data_dir",
    "epochs", "steps_per_epoch", "global_batch_size", "learning_rate", "seed", "run_dir", "resume",
    "checkpoint_steps", "copy_to",
    "profile", "cluster", "task", "start_timeout", "variables", "shards", "min_shard_kib", "synchronous",
    "max_staleness",
    "steps_per_dispatch", "model", "flagfile", "undefok", "v", "verbosity", "noresume", "nosynchronous",
    "stderrthreshold",
)  # fmt: skip
NUMBERS = ("0", "1", "2", "-1", "1.5", "1e400", "nan", "inf", "0x10", "1_0", "٣", "9" * 30, "9" * 5000)
WORDS = (
    "true",
    "auto",
    "growth",
    "0.4",
    "1024",
    "sharded",
    "0,1",
    "MIG-1",
    "-1",
    "free",
    "bytes",
    "itself",
    ".",
    "none",
)


def command_lines(names, words):
    """Flags with and without values, values without flags, and anything between."""
    name = st.one_of(st.sampled_from(names), texts)
    value = st.one_of(st.sampled_from([*NUMBERS, *words]), texts)
    flag = st.tuples(st.sampled_from(["--", "--", "--", "-", "", "---", "--no"]), name)
    flag = st.one_of(st.tuples(flag, value).map(lambda f: f"{''.join(f[0])}={f[1]}"), flag.map("".join))
    return st.lists(st.one_of(flag, flag, value, st.just("--")), max_size=5)


@fuzzed()
@given(arguments=command_lines(NAMES, WORDS))
@example(arguments=["--flagfile=bytes"])
@example(arguments=["--flagfile=."])
@example(arguments=["--flagfile=itself"])
@example(arguments=["--flagfile"])
@example(arguments=["--noresume=0"])
@example(arguments=["--" + "x" * 300])
@example(arguments=["--epochs=" + "9" * 5000])
def test_any_flags_of_a_recipe(recipe, arguments):
    for name in recipe:
        flags.FLAGS[name].unparse()
    with answered(), contextlib.redirect_stderr(io.StringIO()):
        program._parse(["program", *arguments])
        DeviceRequest(**toolkit.cli.flags.devices())
        toolkit.cli.flags.parameter_servers()
        assert flags.FLAGS.epochs > 0


LAUNCH = (
    "on", "env", "native_logs", "help",
    "workers", "ps", "chief", "evaluator", "host", "cluster", "task", "log_dir", "show", "as_is",
    "start_timeout", "heartbeat_timeout", "stall_timeout", "grace", "max_restarts",
)  # fmt: skip
SLURM = (
    "nodes",
    "tasks_per_node",
    "gpus_per_task",
    "cpus_per_task",
    "time",
    "notice",
    "partition",
    "account",
    "sbatch",
    "name",
)
WHAT = ([], ["it's.py"], ["-m", "recipes.x", "--seed=1"], ["--", "-x.py"], ["--", "-m"], ["-mx"], ["."], ["-m"])
PLACES = (
    "127.0.0.1",
    "::1",
    "localhost",
    "192.0.2.1",
    "two.json",
    "worker:0",
    "worker:7",
    "60",
    "1-12",
    "a b",
    "slurm",
    "ssh:a",
)


def run(*arguments):
    """What `toolkit` does with a command line, in this process; returns what it prints."""
    shown = io.StringIO()
    ends = contextlib.suppress(SystemExit)  # --help
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()), ends:
        main._run(list(arguments))
    return shown.getvalue()


@fuzzed(0.5)
@given(
    counts=st.sampled_from([[], ["--workers=2"], ["--chief", "--ps=1", "--workers=1"], ["--cluster=two.json"]]),
    given_=command_lines(LAUNCH, PLACES),
    what=st.one_of(st.sampled_from(WHAT), st.lists(texts, max_size=2)),
)
@example(counts=["--workers=1000000"], given_=[], what=["it's.py"])
@example(counts=["--workers=" + "9" * 30], given_=[], what=["it's.py"])
@example(counts=["--workers=2"], given_=["--host=" + "x" * 300], what=["it's.py"])
@example(counts=["--workers=2"], given_=["--host=."], what=["it's.py"])
@example(counts=["--workers=2"], given_=[], what=["x" * 300])
@example(counts=["--workers=2"], given_=[], what=["\0"])
@example(counts=["--workers=2"], given_=["--grace=inf"], what=["it's.py"])
def test_any_command_line_of_launch(counts, given_, what):
    with answered():
        run("launch", "--dry_run", *counts, *given_, *what)


@fuzzed()
@given(
    given_=command_lines((*LAUNCH, *SLURM), PLACES), what=st.one_of(st.sampled_from(WHAT), st.lists(texts, max_size=2))
)
@example(given_=["--log_dir=\0"], what=["it's.py"])
@example(given_=["--log_dir=~nobody-of-that-name"], what=["it's.py"])
@example(given_=["--time=" + "9" * 5000], what=["it's.py"])
@example(given_=["--time=٣"], what=["it's.py"])
@example(given_=["--nodes=" + "9" * 5000], what=["it's.py"])
def test_any_command_line_of_launch_for_slurm(given_, what):
    with answered():
        run("launch", "--dry_run", "--on=slurm", *given_, *what)


KUBERNETES = (
    "name", "workers", "chief", "ps", "evaluator", "image", "namespace",
    "gpus_per_task", "cpus_per_task", "memory", "patch",
    "volume", "env",
    "port", "max_restarts", "user", "python",
)  # fmt: skip
ITS = (
    "500m",
    "8Gi",
    "runs:/runs",
    "runs:/a:b",
    "A=b",
    "A",
    "=b",
    "x" * 64,
    "2222",
    "a-",
    "A",
)


@fuzzed()
@given(
    given_=command_lines(KUBERNETES, ITS),
    what=st.one_of(st.sampled_from([["-m", "recipes.x"], [], ["-m"]]), st.lists(texts, max_size=2)),
    named=st.sampled_from([["--name=a", "--image=i", "--workers=2"], ["--name=a", "--image=i"], []]),
)
@example(given_=["--workers=999999999"], what=["-m", "x"], named=["--name=a", "--image=i"])
@example(given_=["--env", "\ud800"], what=["-m", "x"], named=["--name=a", "--image=i", "--workers=2"])
@example(given_=["--workers=" + "9" * 30], what=["-m", "x"], named=["--name=a", "--image=i"])
def test_any_command_line_of_launch_for_kubernetes(given_, what, named):
    with answered():
        run("launch", "--on=kubernetes", *named, *given_, *what)


@fuzzed()
@given(
    action=st.sampled_from(["generate", "check", "explain", "x"]),
    given_=command_lines(
        ("worker", "ps", "chief", "evaluator", "cluster", "task", "all"), (*PLACES, "a:1", "b:2", "bytes")
    ),
)
def test_any_command_line_of_tf_config(monkeypatch, action, given_):
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    with answered():
        run("tf-config", action, *given_)


@fuzzed()
@given(
    command=st.one_of(st.sampled_from(["report", "doctor", "plan", "scaling", "devices", "launch"]), texts),
    given_=command_lines(("out", "cluster", "json", "watch", "replicas", "help"), PLACES),
)
@example(command="report", given_=["x" * 300])
@example(command="report", given_=["\0"])
def test_any_command(monkeypatch, command, given_):
    monkeypatch.setattr(importlib.import_module("toolkit.cli.launch"), "start", lambda *_, **__: "")
    for name in ("observe:Doctor", "plan", "observe:Scaling", "devices"):  # Only their command lines are tried.
        monkeypatch.setattr(pkgutil.resolve_name(f"toolkit.cli.{name}"), "run", lambda _: 0)
    with answered():
        run(command, *given_)
