"""A run directory that somebody or something has damaged: read as far as it goes, or refused in a sentence.

TOOLKIT_FUZZ_CASES says how many cases each test tries; see `fuzzing`.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
from fuzzing import Raw, answered, damaged, dumped, fuzzed, limited, texts, values
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.observe import report
from toolkit.training import Checkpoint, CheckpointStore
from toolkit.training.directory import RunDirectory

pytestmark = [
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # Hypothesis's, of 100 kB of text.
    pytest.mark.filterwarnings("default"),  # matplotlib's, of numbers that don't fit into a picture.
]
SUMMARY = {
    "recipe": "mine",
    "status": "completed",
    "devices": ["CPU:0"],
    "test_accuracy": 0.5,
    "steps": 6,
    "step": {"steps": 5, "milliseconds": 7.0, "compute": 5.0, "communication": 1.0, "input": 0.5, "other": 0.5},
    "parameter_servers": {"staleness": {"0": 4, "1": 2}, "steps_by_worker": {"worker:0": 6}},
    "parallelism": [{"conv": "replicated", "fc": "sharded", "predicted_seconds": 0.5, "measured_seconds": 0.4}],
    "command": ["python", "-m", "recipes.x", "--seed=1"],
    "versions": {"tensorflow": "2.21.0"},
}
EVENTS = [
    {"event": "started", "task": "worker:0", "at": 1e9, "pid": 1},
    {"event": "ended", "task": "worker:0", "at": 1e9 + 5, "pid": 1, "code": 0, "dismissed": False},
]
JSONS = ("run.json", "summary.json", "events.jsonl", "checkpoints/step-00000006/manifest.json")
FILES = (*JSONS, "history.csv", "evaluation.csv", ".lock", "checkpoints/step-00000006/arrays.safetensors")
PLACES = (
    *FILES,
    "checkpoints",
    "checkpoints/step-00000006",
    "checkpoints/step-00000003/manifest.json",
    ".writing",
    "report.html",
)
NAMES = (
    "checkpoints/step-٣٣٣٣٣٣٣٣", "checkpoints/step-" + "9" * 200, "checkpoints/step-00000007-end",
    "checkpoints/damaged-step-00000006",
    "checkpoints/\udcff", "checkpoints/step-00000006-end\n", "..writing.writing", "history.csv\n", "-rf", "$(x)",
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small run as it ought to be."""
    path = tmp_path_factory.mktemp("sound") / "run"
    directory = RunDirectory(path, recipe="mine")
    directory.record_config({"model": "small", "seed": 1})
    store = CheckpointStore(directory.checkpoints)
    for step in (3, 6):
        arrays = {"weight": np.arange(step, dtype=np.float32)}
        store.save(Checkpoint(step=step, arrays=arrays, metadata={"epochs": 2}))
    directory.close()
    (path / "summary.json").write_text(json.dumps({**SUMMARY, "launch_logs": "."}))
    (path / "history.csv").write_text("epoch,step,loss,val_loss\n1,3,2.0,2.1\n2,6,1.0,1.5\n")
    (path / "evaluation.csv").write_text("step,loss\n3,2.0\n")
    (path / "events.jsonl").write_text("\n".join(map(json.dumps, EVENTS)) + "\n")
    return path


def place(kind, path, content=b""):
    """Puts something into the place of a file, or of a directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "file":
        path.write_bytes(content)


KINDS = ("nothing", "directory", "pipe", "link to itself", "link to nothing", "device", "file")
keys = st.sampled_from(
    ["recipe", "config", "status", "step", "milliseconds", "compute", "parameter_servers", "staleness", "0",
    "parallelism",
     "launch_logs", "command", "versions", "devices", "event", "task", "at", "pid", "code", "format", "sha256",
     "dtypes",
     "metadata", "conv", "test_accuracy", "weights_sha256", "steps_by_worker", "emulated"]
)  # fmt: skip
damages = st.one_of(
    st.tuples(st.just("kind"), st.sampled_from([*PLACES, *NAMES]), st.sampled_from(KINDS)),
    st.tuples(st.just("cut"), st.sampled_from(FILES), st.integers(0, 200)),
    st.tuples(st.just("flip"), st.sampled_from(FILES), st.integers(0, 2000)),
    st.tuples(st.just("bytes"), st.sampled_from(FILES), st.binary(max_size=40)),
    st.tuples(
        st.just("bytes"),
        st.sampled_from(FILES),
        damaged(values.map(dumped)).map(lambda t: t.encode(errors="surrogatepass")),
    ),
    st.tuples(st.just("key"), st.sampled_from(JSONS), st.tuples(keys, values)),
    st.tuples(st.just("table"), st.sampled_from(["history.csv", "evaluation.csv"]), st.lists(texts, max_size=8)),
)


def changed(value, name, new):
    """The same JSON with this key's value replaced, wherever it stands, or added at its top."""

    def inner(each):
        if isinstance(each, dict):
            return {key: new if key == name else inner(member) for key, member in each.items()}
        return [inner(member) for member in each] if isinstance(each, list) else each

    made = inner(value)
    return made if not isinstance(made, dict) or made != value else {**made, name: new}


def damage(path, how, where, what):
    """Does one damage to a run directory."""
    file = pathlib.Path(path, where)
    if how == "kind":
        with contextlib.suppress(OSError):  # An earlier damage has left no directory for it.
            place(what, file, b"{}")
        return
    if not file.is_file() or file.is_symlink():
        return
    data = file.read_bytes()
    if how == "cut":
        data = data[:what]
    elif how == "flip" and data:
        data = data[: what % len(data)] + bytes([data[what % len(data)] ^ 1]) + data[what % len(data) + 1 :]
    elif how == "bytes":
        data = what
    elif how == "table":
        data += ",".join(what).encode(errors="surrogatepass")
    elif how == "key":
        data = b"\n".join(rewritten(line, *what) for line in (data.splitlines() if "jsonl" in where else [data]))
    file.write_bytes(data)


def rewritten(data, name, new):
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if isinstance(value, dict) and "manifest_sha256" in value and not isinstance(new, Raw):
        # With a sum that fits: it is what was written that is odd, and no accident.
        del value["manifest_sha256"]
        text = dumped(changed(value, name, new)).replace("\\ud800", "?").replace("\\udcff", "?")
        try:
            value = json.loads(text, parse_int=small)
        except RecursionError:
            return data
        value["manifest_sha256"] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        return json.dumps(value).encode()
    return dumped(changed(value, name, new)).encode(errors="surrogatepass")


def small(digits):
    return int(digits[:400])


def copied(sound, folder):
    path = pathlib.Path(folder, "run")
    shutil.copytree(sound, path)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "launch_logs": str(path)}))
    return path


@fuzzed()
@given(done=st.lists(damages, min_size=1, max_size=3), resume=st.booleans())
@example(done=[("bytes", "run.json", b"[" * 100_000)], resume=True)
@example(done=[("kind", "run.json", "pipe")], resume=True)
@example(done=[("kind", "run.json", "device")], resume=False)
@example(done=[("kind", ".lock", "pipe")], resume=True)
@example(done=[("kind", ".writing", "directory")], resume=True)
@example(done=[("kind", "..writing.writing", "pipe")], resume=True)
def test_a_run_that_is_to_go_on(sound, done, resume):
    with tempfile.TemporaryDirectory() as folder:
        path = copied(sound, folder)
        for each in done:
            damage(path, *each)
        with answered():
            directory = RunDirectory(path, recipe="mine", resume=resume)
            try:
                directory.record_config({"model": "small", "seed": 1})
                directory.check_space(1000)
            finally:
                directory.close()


@pytest.mark.slow
@fuzzed()
@given(done=st.lists(damages, min_size=1, max_size=3))
@example(done=[("bytes", "checkpoints/step-00000006/manifest.json", b"[" * 100_000)])
@example(done=[("kind", "checkpoints/step-00000006/manifest.json", "pipe")])
@example(done=[("kind", "checkpoints/step-00000006/manifest.json", "device")])
@example(done=[("kind", "checkpoints/step-00000006/arrays.safetensors", "device")])
@example(
    done=[
        ("kind", "checkpoints/damaged-step-00000006", "pipe"),
        ("bytes", "checkpoints/step-00000006/manifest.json", b""),
    ]
)
@example(done=[("key", "checkpoints/step-00000006/manifest.json", ("step", "x"))])
@example(done=[("key", "checkpoints/step-00000006/manifest.json", ("metadata", [1]))])
@example(done=[("key", "checkpoints/step-00000006/manifest.json", ("dtypes", {"weight": "x" * 300}))])
def test_checkpoints_to_resume_from(sound, done):
    with tempfile.TemporaryDirectory() as folder:
        path = copied(sound, folder)
        for each in done:
            damage(path, *each)
        store = CheckpointStore(path / "checkpoints")
        with answered():
            newest = store.newest(after=0)
        with answered():
            loaded = store.load()
            assert loaded.step in (3, 6)
            assert newest is not None
            assert newest.step == loaded.step
            assert loaded.arrays["weight"].tobytes() == np.arange(loaded.step, dtype=np.float32).tobytes()
            store.save(Checkpoint(step=9, arrays=loaded.arrays, metadata=dict(loaded.metadata)))
            assert store.load().step == 9


@fuzzed()
@given(done=st.lists(damages, min_size=1, max_size=3))
@example(done=[("kind", "summary.json", "pipe")])
@example(done=[("kind", "history.csv", "device")])
@example(done=[("kind", "history.csv", "pipe")])
@example(done=[("kind", "events.jsonl", "pipe")])
@example(done=[("kind", "run.json", "link to itself"), ("kind", "summary.json", "link to itself")])
@example(done=[("key", "summary.json", ("launch_logs", "\0"))])
@example(done=[("key", "summary.json", ("launch_logs", "x" * 100_000))])
def test_what_a_report_reads(sound, done):
    with tempfile.TemporaryDirectory() as folder:
        path = copied(sound, folder)
        for each in done:
            damage(path, *each)
        with answered():
            found = report.read(path)
            assert found.notes is not None


@pytest.mark.slow
@fuzzed(0.1)
@given(done=st.lists(damages, min_size=1, max_size=3))
def test_there_is_a_page_all_the_same(sound, done):
    from toolkit.observe.report.page import render

    with tempfile.TemporaryDirectory() as folder:
        path = copied(sound, folder)
        for each in done:
            damage(path, *each)
        with answered():
            run = report.read(path)
        with limited(seconds=5):  # Pictures take a second.
            assert "</html>" in render([run])
