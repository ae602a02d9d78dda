"""What a shell, a path, YAML or HTML reads in its own way goes through as it is, or is refused in a sentence."""

import collections
import contextlib
import csv
import html.parser
import io
import json
import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys

import numpy as np
import pytest
import yaml
from fuzzing import refused

from toolkit.cli.main import _run
from toolkit.cluster import Cluster, Task, discover, parse
from toolkit.cluster.discovery import read_file
from toolkit.errors import RequestError
from toolkit.launch import JobSpec
from toolkit.launch.backends import queued
from toolkit.launch.record import Record
from toolkit.observe import report
from toolkit.training import Checkpoint, CheckpointStore
from toolkit.training.directory import RunDirectory, choose

PYTHON = sys.executable  # Before a test puts something else there.

ROOT = pathlib.Path(__file__).parents[2]
HOSTILE = {
    "single quote": "it's",
    "double quote": 'a "b" c',
    "command": "$(touch hostile-was-here)",
    "backticks": "`touch hostile-was-here`",
    "variable": "$HOME ${HOME} $(HOME) $$(HOME) $$",
    "end of line": "a\ntouch hostile-was-here\n",
    "carriage return": "a\r\nb",
    "comment of sbatch": "a\n#SBATCH --exclusive\n",
    "operators": "a; touch hostile-was-here & b | c > d < e && f",
    "leading dash": "-rf",
    "long flag": "--log_dir=x",
    "two dashes": "--",
    "spaces": "  a  b ",
    "empty": "",
    "Unicode": "é ü 漢字 🙂",
    "other direction": "a\u202eb\u2028c\x85d",
    "no text": os.fsdecode(b"\xff\xfe a"),
    "NUL": "a\0b",
    "per cent": "%t %% %j %s",
    "backslash": "a\\nb\\",
    "glob": "* ? [a-z] {a,b} ~ !",
    "script": "</script><script>alert(1)</script>",
    "element": "\"><img src=x onerror=alert(1)>'",
    "comment": "--><!-- ]]> <?x",
    "template": "{{ 7*7 }} {% raw %}",
    "YAML": "a: [b, {c: &d *e}]\n---\n- !!python/object:os.system",
    "number": "1e3",
    "truth": "no",
    "escapes": "\x1b[31m\x07\x08",
    "long": "x'" * 50_000,
}
SHORT = {
    "single quote",
    "command",
    "end of line",
    "leading dash",
    "spaces",
    "empty",
    "no text",
    "NUL",
    "script",
    "YAML",
}
every = pytest.mark.parametrize(
    "value",
    [pytest.param(v, id=name, marks=[] if name in SHORT else pytest.mark.long) for name, v in HOSTILE.items()],
)
TO_PROGRAMS = [value for value in HOSTILE.values() if "\0" not in value]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A directory of the test's own, in which nothing runs what it is not told to."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    yield
    assert not list(tmp_path.rglob("hostile-was-here"))


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Stands for the Python interpreter: writes its arguments, one after another, each with a NUL."""
    path = tmp_path / "it's python"
    path.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def printed(*arguments):
    """What a command prints, or the reason why not."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        _run(list(arguments))
    return out.getvalue()


def by_shell(text):
    """Runs a script by a shell, and returns the arguments that the stub was given."""
    done = subprocess.run(["sh"], input=os.fsencode(text), capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return [os.fsdecode(part) for part in done.stdout.split(b"\0")[:-1]]


def test_arguments_of_launched_tasks_reach_no_shell(stub):
    pathlib.Path("train.py").write_text("")
    line = printed("launch", "--dry_run", "--workers=1", "train.py", *TO_PROGRAMS)
    assert shlex.split(line)[-len(TO_PROGRAMS) :] == TO_PROGRAMS
    assert by_shell(line)[-len(TO_PROGRAMS) - 1 :] == ["train.py", *TO_PROGRAMS]


@every
def test_a_script_of_any_name_is_launched_or_refused(stub, value):
    name = value.replace("/", "_")[:100] + ".py"
    with refused():
        with contextlib.suppress(ValueError):
            pathlib.Path(name).write_text("")
        line = printed("launch", "--dry_run", "--workers=1", "--log_dir", f"./{value}", "--", name)
        assert by_shell(line)[-1] == name
        return
    assert "\0" in name


@every
@pytest.mark.parametrize("flag", ["--task", "--show", "--host", "--cluster", "--on"])
def test_other_flags_of_launch_take_nothing_of_the_kind(flag, value):
    pathlib.Path("train.py").write_text("")
    if value or flag == "--on":
        with refused():
            printed("launch", "--dry_run", "--workers=1", f"{flag}={value}", "train.py")
            pytest.fail("it was taken")


def test_a_slurm_job_is_read_back_as_it_was_asked_for(tmp_path, monkeypatch):
    """No shell and no program of Slurm's sees an argument: they lie in job.json, which only the user can read."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    logs = tmp_path / "logs of it's $(x) %t\n#SBATCH --exclusive"
    spec = JobSpec(command=("-m", "x", *TO_PROGRAMS), on="slurm", log_dir=str(logs), env=(f"A={TO_PROGRAMS[0]}",))
    with pytest.raises(RequestError, match="sbatch refused it: no"):
        queued.submit(spec, follow=True)
    (record,) = logs.glob("*/job.json")
    assert Record(record.parent).job()["spec"] == spec
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    text = (record.parent / "job.sh").read_text(errors="surrogateescape")
    head, _, _ = text.partition("exec ")
    assert all(line.startswith("#") for line in head.split("\n")[:-1])
    directives = [line for line in head.split("\n") if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w@:.+-]+)?", line) for line in directives)


def test_the_script_of_a_slurm_job_names_its_directory_whatever_it_is_called(stub, tmp_path):
    logs = tmp_path / "logs of it's $(x) %t\n#SBATCH --exclusive"
    text = printed("launch", "--on=slurm", "--dry_run", f"--log_dir={logs}", "--workers=2", "-m", "x", *TO_PROGRAMS)
    assert by_shell(text)[-1] == str(logs / "launch-ID")


@every
@pytest.mark.parametrize("flag", ["--name", "--partition", "--account", "--time", "--log_dir", "--sbatch"])
def test_a_slurm_job_takes_names_or_refuses_them(stub, flag, value):
    pathlib.Path("train.py").write_text("")
    with refused():
        text = printed("launch", "--on=slurm", "--dry_run", f"{flag}={value}", "--", "train.py")
        directives = [line for line in text.partition("exec ")[0].splitlines() if line.startswith("#SBATCH")]
        if flag == "--log_dir":
            assert by_shell(text)[-1] == str(pathlib.Path(value or "runs", "launch-ID").absolute())
        elif flag != "--sbatch":
            name = flag[2:].replace("_", "-").replace("name", "job-name") if flag == "--name" else flag[2:]
            assert ["#SBATCH", f"--{name}={value}"] in [shlex.split(line) for line in directives]
            assert value.isprintable()
        # One option a line, whatever is in it.
        assert all(len(shlex.split(line)) == 2 for line in directives)


def expanded(text):
    """As kubelet does: https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/."""
    parts = re.split(r"(\$\$|\$\([^)]*\))", text)
    return "".join("$" if part == "$$" else "EXPANDED" if part.startswith("$(") else part for part in parts)


FLAGS = (
    "name",
    "namespace",
    "image",
    "cpus_per_task",
    "memory",
    "volume",
    "env",
    "python",
    "-m",
    "claim",
    "variable",
)


@every
@pytest.mark.parametrize("flag", FLAGS)
def test_a_manifest_holds_what_was_given_or_it_is_refused(flag, value):
    given = {"name": "a", "image": "i", "volume": "c:/p", "env": "A=b", "python": "python"}
    shown = {"volume": f"c:/{value}", "claim": f"{value}:/p", "env": f"A={value}", "variable": f"{value}=b"}
    given[{"claim": "volume", "variable": "env"}.get(flag, flag)] = shown.get(flag, value)
    module = ["-m", "x", given.pop("-m", "y")]
    flags = [f"--{name}={text}" for name, text in given.items()]
    with refused():
        documents = list(yaml.safe_load_all(printed("launch", "--on=kubernetes", "--workers=2", *flags, *module)))
        assert [each["kind"] for each in documents] == ["Service", "NetworkPolicy", "Job"]
        (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
        assert [expanded(part) for part in container["command"]] == [given["python"] or "python", *module]
        assert container["image"] == given["image"]
        assert (
            expanded(
                {each["name"]: each["value"] for each in container["env"]}[
                    given["env"][:-2] if flag == "variable" else "A"
                ]
            )
            == given["env"].partition("=")[2]
        )
        assert container["volumeMounts"][-1]["mountPath"] == given["volume"].partition(":")[2]
        assert documents[0]["metadata"].get("namespace") == given.get("namespace")
        taken = value
    if flag in ("name", "namespace", "memory", "claim", "variable"):
        assert "taken" not in locals() or re.fullmatch(r"[A-Za-z0-9_]*|no|1e3", taken), taken


class Seen(html.parser.HTMLParser):
    """Counts elements, and gathers attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.text = collections.Counter(), set(), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def made(name, values):
    """A run directory whose every text is one of these."""
    path = pathlib.Path(name)
    path.mkdir()
    (path / "logs").mkdir()
    texts = {f"{number}": value for number, value in enumerate(values)}
    summary = {
        **dict.fromkeys(("recipe", "status", "strategy", "model", "dataset"), " ".join(values)),
        "devices": list(values),
        "parallelism": [{"conv": v, "fc": v, "predicted_seconds": 1, "measured_seconds": 1} for v in values],
        "parameter_servers": {"staleness": {"0": 1}, "steps_by_worker": {v + n: 1 for n, v in texts.items()}, **texts},
        "versions": texts,
        "command": list(values),
        "launch_logs": str(path / "logs"),
    }
    path.joinpath("summary.json").write_text(json.dumps(summary))
    with open(path / "history.csv", "w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([["epoch", "loss", *texts.values()], [1, 2, *values]])
    events = [{"event": "started", "task": value, "at": 1e9, "pid": 1} for value in values]
    (path / "logs" / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    (path / "logs" / "failure.json").write_text(json.dumps({"last_lines": list(values)}))
    return path


@pytest.mark.slow
def test_a_page_shows_what_a_run_says_and_obeys_none_of_it():
    hostile = [value.replace("\0", "")[:200] for value in HOSTILE.values() if value.strip()]
    harmless = [f"value{number}" for number, _ in enumerate(hostile)]
    # Names of directories, as far as there can be such.
    names = [
        "".join(hostile[:8]).replace("/", "_")[:80],
        HOSTILE["script"].replace("/", "\\"),
        HOSTILE["element"],
        "-rf",
    ]
    page = Seen(report.write([made(name, hostile) for name in names], "page.html").read_text())
    plain = Seen(report.write([made(f"run{n}", harmless) for n, _ in enumerate(names)], "plain.html").read_text())
    assert "script" not in page.elements
    assert page.elements["img"] == 0
    assert page.elements["h3"] == plain.elements["h3"], "a picture is missing"
    assert {name: page.elements[name] for name in ("table", "tr", "td", "th", "p", "pre", "figure", "svg")} == {
        name: plain.elements[name] for name in ("table", "tr", "td", "th", "p", "pre", "figure", "svg")
    }
    assert set(page.elements) <= set(plain.elements)
    assert page.attributes <= plain.attributes
    for value in ("<script>alert(1)</script>", HOSTILE["element"], HOSTILE["template"]):
        assert value in page.text


@every
def test_a_run_directory_of_any_name_is_used_or_refused(value):
    with refused():
        directory = RunDirectory(value, recipe="mine")
        directory.record_config({"note": value})
        store = CheckpointStore(directory.checkpoints)
        store.save(Checkpoint(step=1, arrays={"a": np.zeros(2)}, metadata={"note": "x"}))
        directory.close()
        (directory.path / "history.csv").write_text("epoch\n1\n")
        again = RunDirectory(value, recipe="mine", resume=True)
        again.record_config({"note": value})
        again.close()
        assert store.load().step == 1
        assert report.write([value]).exists()
        assert choose(None, recipe="mine", under=pathlib.Path(value))[0].parent == pathlib.Path(value)
        return
    assert value in (HOSTILE["NUL"], HOSTILE["long"], HOSTILE["no text"])


@every
def test_tasks_addresses_and_clusters_take_nothing_of_the_kind(value):
    mpi = {
        f"OMPI_COMM_WORLD_{name}": number for name, number in zip(("SIZE", "RANK", "LOCAL_RANK"), "200", strict=True)
    }
    mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"
    if value:
        with pytest.raises(RequestError):
            discover({**mpi, "TOOLKIT_TASKS": value})
        with pytest.raises(RequestError):
            discover({**mpi, "TOOLKIT_TASKS": f"worker:2,{value}"})
    for wrong in (f"{value}:0", f"worker:{value}"):
        with pytest.raises(RequestError):
            Task.parse(wrong)
    with refused():
        cluster = Cluster({"worker": [f"{value}:1"]})
        for task, text in cluster.tf_configs():
            assert parse(text, source="x").task == task
        line = printed("tf-config", "generate", f"--worker={value}:1", "--all")
        assert shlex.split(line, comments=True)[2:] == []
        assert re.fullmatch(r"[\w.-]+", value)
    with pytest.raises(RequestError):
        Cluster({value: ["a:1"]})
    with pytest.raises(RequestError):
        read_file(f"{value}/x")
