"""README and manual: samples run, in the order of their page; flags, files and figures that are named are there."""

import collections
import contextlib
import csv
import importlib
import io
import pathlib
import re
import sys

import processes
import pytest

from toolkit.cli import main
from toolkit.launch import queues

ROOT = processes.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IN_TEST = ("README.md", "docs/start/ten_minutes.md", "docs/guides/custom_steps.md")
# Flags of other programs, and one that stands for any.
OTHERS = {
    "dest",
    "find-links",
    "flag",
    "max-restarts",
    "nnodes",
    "no-index",
    "nproc_per_node",
    "ntasks",
    "ntasks-per-node",
    "rdzv_endpoint",
    "logdir",
    "job_name",
    "task_index",
}


def named(page):
    return str(page.relative_to(ROOT))


def samples(page):
    """The Python of a page, as one script."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


# Of TensorFlow 1, and what tests/training/test_ray.py and test_trackers.py run.
ELSEWHERE = ("from-tf1.md", "ray.md", "trackers.md")
WITH_SAMPLES = [page for page in PAGES if samples(page) and page.name not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page if named(page) in IN_TEST else pytest.param(page, marks=pytest.mark.long) for page in WITH_SAMPLES],
    ids=named,
)
def test_the_samples_of_a_page_run(page, tmp_path):
    (tmp_path / "page.py").write_text(samples(page), encoding="utf-8")
    ended = processes.python(tmp_path, "page.py", limit=200)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


def known_flags():
    """Of all commands as their help has them, of recipes and benchmarks as they are defined, and of other programs."""
    out = io.StringIO()
    for command in main._COMMANDS:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main.main([command, "--help=all" if command == "launch" else "--help"])
    files = [path for room in ("toolkit/cli", "recipes", "benchmarks") for path in (ROOT / room).glob("*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    defined = re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"|add_argument\(\s*\"--([\w-]+)\"", sources)
    shown = re.findall(r"--(?:\[no-\])?([a-z][\w-]*)", out.getvalue())
    return (
        {*(name for pair in defined for name in pair), *shown}
        | OTHERS
        | {name for queue in queues.every() for name in queue.own}
    )


def test_every_flag_that_is_named_exists():
    known = known_flags()
    unknown = collections.defaultdict(set)
    for page in PAGES:
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            if flag not in known and flag.removeprefix("no") not in known:
                unknown[named(page)].add(flag)
    assert not unknown


def test_every_file_that_is_named_exists():
    missing = collections.defaultdict(set)
    for page in PAGES:
        folders = "toolkit|recipes|tests|benchmarks|scripts|docs|tf_configs"
        for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8")):
            if not (ROOT / name).exists():
                missing[named(page)].add(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists() or page.name == "security.md", f"{named(page)} -> {target}"


def test_the_first_page_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 135


def test_the_first_page_counts_the_cells_of_the_table():
    rows = list(csv.DictReader((ROOT / "docs/features.csv").read_text(encoding="utf-8").splitlines()))
    columns = ("mirrored", "sharded", "run", "xla", "workers", "xla_workers", "in_turn", "rounds", "free")
    counts = collections.Counter(row[column].partition(":")[0] for row in rows for column in columns)
    same, works, refused = (counts[word] for word in ("same numbers", "works", "refused"))
    said = (
        f"of the {len(columns) * len(rows)} pairs, {same} have the same numbers. {works} have other numbers, "
        f"because updates are asynchronous. {refused} end in an error"
    )
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(rows)} things that Keras users do" in text
    assert said in text


@pytest.fixture
def generated(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generated")


def test_every_command_has_a_place_in_the_manual(generated):
    assert sorted(generated.COMMANDS) == sorted(main._COMMANDS)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="another Python writes signatures and help otherwise")
def test_what_is_made_of_the_code_is_as_the_code(generated):
    other = [named(page) for page in generated.pages() if generated.filled(page) != page.read_text("utf-8")]
    assert not other, "`python docs/generated.py` writes them"


def test_pages_name_nothing_of_one_machine():
    for page in PAGES:
        assert not re.search(r"/(home|root|work)/", page.read_text(encoding="utf-8")), named(page)


def test_the_manual_lists_every_page():
    listed = re.findall(r"^([\w/-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    }
    assert pages - {"index"} == set(listed)


def test_the_first_page_counts_what_other_pages_list():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cases = re.findall(r"^\d\. ", (ROOT / "docs/concepts/same_numbers.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"{('seven', 'eight', 'nine')[len(cases) - 7]} cases in which numbers differ more" in readme


def test_there_is_a_picture():
    assert pathlib.Path(ROOT / "docs/report.png").read_bytes()[:4] == b"\x89PNG"
