"""The page about a run: made of whatever a run directory holds, whole in itself, and right in a real browser."""

import http.server
import json
import os
import pathlib
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from browser import CHROMIUM, look

from toolkit.cli.main import main
from toolkit.errors import RequestError, RunDirectoryError
from toolkit.launch import jobs
from toolkit.launch.record import Record
from toolkit.observe import report
from toolkit.observe.report.page import column
from toolkit.observe.report.reading import read, spans_of, told_apart

browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
STEP = {"steps": 5, "milliseconds": 76.0, "compute": 70.0, "communication": 3.0, "input": 0.5, "other": 2.5}
ROW = {
    "predicted_seconds": 0.5,
    "measured_seconds": 0.52,
    "predicted_bytes": 1e7,
    "measured_bytes": None,
    "parameters": 10**7,
    "loss": 2.1,
}
EVENTS = [
    ("started", "chief:0", 0.0, 1, {}),
    ("started", "worker:0", 0.1, 2, {}),
    ("ended", "worker:0", 20.0, 2, {"code": -9, "dismissed": False}),
    ("started", "worker:0", 20.5, 3, {}),
    ("ended", "chief:0", 60.0, 1, {"code": 0, "dismissed": False}),
    ("ended", "worker:0", 61.0, 3, {"code": 143, "dismissed": True}),
]


def made(folder, name="a run", **changes):
    """A run directory with something for every picture."""
    path = folder / name
    path.mkdir(parents=True)
    (folder / "logs").mkdir(exist_ok=True)
    lines = [json.dumps({"event": e, "task": t, "at": 1e9 + at, "pid": pid, **more}) for e, t, at, pid, more in EVENTS]
    (folder / "logs" / "events.jsonl").write_text("\n".join(lines) + '\n{"at": 1')
    summary = {
        "recipe": "cifar_mirrored",
        "status": "completed",
        "emulated": True,
        "replicas": 2,
        "devices": ["CPU:0", "CPU:1"],
        "test_accuracy": 0.8125,
        "wall_seconds": 61.0,
        "step": STEP,
        "launch_logs": str(folder / "logs"),
        "parallelism": [
            {"conv": "replicated", "fc": "sharded", **ROW},
            {"conv": "planned", "fc": "planned", **ROW, "measured_seconds": 0.49},
        ],
        "parameter_servers": {
            "staleness": {"0": 40, "1": 75, "2": 5},
            "updates": 120,
            "steps_by_worker": {"worker:0": 120},
        },
        "command": ["python", "-m", "recipes.x", "--api_token=hunter2", "it's"],
        "versions": {"tensorflow": "2.21.0"},
        **changes,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "run.json").write_text(json.dumps({"recipe": "cifar_mirrored", "config": {"seed": 1}}))
    rows = ["epoch,step,loss,accuracy,val_loss,val_accuracy,images_per_second", *(
        f"{n},{100 * n},{2 / n},{0.3 * n},{2.1 / n},{0.25 * n},{1000 + n}" for n in (1, 2, 3)
    )]  # fmt: skip
    (path / "history.csv").write_text("\n".join(rows) + "\n")
    return path


PICTURES = [
    "loss",
    "accuracy",
    "Ways to divide the layers, predicted and measured",
    "Staleness of gradients",
    "Examples per second",
    "Where a step's time goes",
    "Tasks, their ends and restarts",
]


@pytest.mark.smoke
def test_one_run_goes_into_its_directory_with_every_picture(tmp_path):
    path = made(tmp_path)
    assert report.write([path]) == path / "report.html"
    text = (path / "report.html").read_text()
    assert [title.replace("&#39;", "'") for title in re.findall(r"<h3>(.*?)</h3>", text)] == PICTURES
    assert "81.25%" in text
    assert "92% compute, 4% communication, 1% input, 3% other" in text
    assert "61 s, worker:0 ended by SIGKILL, 1 task started again" in text
    assert "<details><summary>All figures of the run" in text
    assert "CPU devices stood in for GPUs" in text
    assert "hunter2" not in text
    assert "--api_token=***" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert references <= set(ids)


def test_what_a_user_needs_to_run_it_again_is_there(tmp_path):
    step = {**STEP, "milliseconds": 10.0, "compute": 4.0, "communication": 0.0, "other": 6.0, "between": 5.0}
    more = {"optimizer": "AdamW", "dtype_policy": "mixed_bfloat16", "environment": {"XLA_FLAGS": "--a --b"}}
    text = report.write([made(tmp_path, step=step, launch_logs=None, **more)]).read_text()
    assert "<pre>XLA_FLAGS=&#39;--a --b&#39; python -m recipes.x" in text
    assert '<th scope="row">optimizer</th><td>AdamW' in text
    assert '<th scope="row">dtype policy</th><td>mixed_bfloat16' in text
    assert "50% between steps (callbacks, starting a step)" in text


def test_the_first_screen_says_what_was_trained_on_what_and_where_time_went(tmp_path):
    step = {**STEP, "milliseconds": 10.0, "communication": 6.0, "compute": 3.0}
    more = {"parameters": 1234567, "hardware": "2 x H100", "sharded_layers": 2, "strategy": "multi_worker"}
    path = made(tmp_path, emulated=False, step=step, examples_per_second=100.0, **more)
    text = report.write([path]).read_text()
    assert re.search(r"parameters</span><b>1,234,567</b>2 x H100", text)
    assert "2 replicas, multi_worker, 2 layers sharded" in text
    assert "60% of a step is communication that nothing hides: fewer replicas may be as fast" in text
    step["communication"] = 4.0
    path = made(tmp_path, "other", emulated=False, step=step)
    assert "that nothing hides: fewer" not in report.write([path]).read_text()


def test_a_report_of_the_script_itself_shows_tasks_that_still_run(tmp_path):
    path = made(tmp_path)
    begun = [{"event": "started", "task": f"worker:{n}", "pid": n, "at": time.time() - 30} for n in (1, 2)]
    (tmp_path / "logs" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in begun))
    spans = spans_of(read(path), prefix="")
    assert [span.ending for span in spans] == ["running when this was written"] * 2
    assert all(29 < span.end - span.start < 60 for span in spans)


def test_tasks_whose_launcher_was_killed_do_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = made(tmp_path)
    begun = [{"event": "started", "task": "worker:0", "pid": 7, "at": 1e9 + 5}]
    (tmp_path / "logs" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in begun))
    jobs.add(Record(tmp_path / "logs"), pid=os.getpid())
    assert [span.ending for span in spans_of(read(path), prefix="")] == ["running when this was written"]
    ended = subprocess.Popen(["true"])
    ended.wait()
    jobs.add(Record(tmp_path / "logs"), pid=ended.pid)
    assert [span.ending for span in spans_of(read(path), prefix="")] == ["ended with its launcher"]
    (tmp_path / "again").mkdir()
    later = [
        {**begun[0], "pid": 8, "at": 1e9 + 50},
        {**begun[0], "event": "ended", "pid": 8, "at": 1e9 + 70, "code": 0},
    ]
    (tmp_path / "again" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in later))
    launches = [str(tmp_path / name) for name in ("logs", "again")]
    (path / "run.json").write_text(json.dumps({"recipe": "x", "config": {}, "launches": launches}))
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "launch_logs": launches[1]}))
    spans = spans_of(read(path), prefix="")
    assert [(span.end - span.start, span.ending) for span in spans] == [(45, "ended with its launcher"), (20, "done")]
    assert "ended with its launcher" in report.write([path]).read_text()


def test_a_steps_time_agrees_with_the_speed_beside_it_and_says_what_was_profiled(tmp_path):
    more = {
        "global_batch_size": 128,
        "examples_per_second": 640.0,
        "measured_steps": 90,
        "peak_memory": [5_000_000, 7_000_000],
    }
    text = report.write([made(tmp_path, parameters=10, hardware="2 x H100", **more)]).read_text()
    assert re.search(r"examples per second</span><b>640</b>2 replicas, [^<]*, mean of 90 steps<", text)
    assert re.search(r"a step</span><b>200.0 ms</b>5 early steps while profiled, 76.0 ms: 92% compute", text)
    assert "2 x H100; at most 5, 7 MB of tensors in memory by replica" in text
    text = report.write([made(tmp_path, "earlier", global_batch_size=128, examples_per_second=640.0)]).read_text()
    assert re.search(r"a step</span><b>76.0 ms</b>", text)


@browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "rows"), [(1200, [5]), (900, [4, 1]), (500, [2, 2, 1])])
def test_no_tile_leaves_its_row_half_empty(tmp_path, width, rows):
    more = {"examples_per_second": 640.0, "parameters": 10, "metrics": {}}
    page = report.write([made(tmp_path, **more)])
    tiles = look(page, tmp_path, width=width, measure=True).seen["tiles"]
    lines = [[tile for tile in tiles if tile[1] == top] for top in sorted({tile[1] for tile in tiles})]
    assert [len(line) for line in lines] == rows
    ends = [max(left + wide for left, _, wide in line) for line in lines]
    assert max(ends) - min(ends) <= 1, "a row ends before the others"


def test_what_was_launched_again_by_hand_shows_the_launch_that_was_killed(tmp_path):
    path = made(tmp_path)
    (tmp_path / "killed").mkdir()
    events = [
        {"event": "started", "task": "worker:0", "pid": 9, "at": 1e9 - 100},
        {"event": "ended", "task": "worker:0", "pid": 9, "at": 1e9 - 50, "code": -9, "dismissed": False},
    ]
    (tmp_path / "killed" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    launches = [str(tmp_path / "killed"), str(tmp_path / "logs")]
    (path / "run.json").write_text(json.dumps({"recipe": "x", "config": {}, "launches": launches}))
    spans = spans_of(read(path), prefix="")
    assert [span.ending for span in spans if span.task == "worker:0"] == [
        "SIGKILL",
        "SIGKILL",
        "ended by the launcher",
    ]


@pytest.mark.slow
def test_several_runs_stand_beside_one_another(tmp_path, monkeypatch, capsys):
    first, second = made(tmp_path, "first"), made(tmp_path, "second", test_accuracy=0.75)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(first), str(second)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert "2 runs compared" in text
    assert re.search(r"val_accuracy</th>\s*<td>81.25%</td>\s*<td>75.00%</td>", text)
    assert "first val_loss" in text
    assert "speed of first" not in text  # CPU devices stood in for GPUs.


@pytest.mark.slow
def test_several_runs_say_what_each_replica_was_worth(tmp_path):
    real = {"emulated": False, "strategy": "mirrored"}
    two = made(tmp_path, "two", examples_per_second=1800.0, replicas=2, **real)
    one = made(tmp_path, "one", examples_per_second=1000.0, replicas=1, **real)
    text = report.write([two, one], out=tmp_path / "page.html").read_text()
    said = (
        "<b>1,800 examples/s</b>2 replicas, mirrored, 1.80 times the speed of one, 90% for each replica, val_accuracy"
    )
    assert said in text
    assert "<b>1,000 examples/s</b>1 replica, mirrored, val_accuracy" in text


@pytest.mark.slow
def test_several_runs_say_what_each_keeps_in_shards_and_their_memory(tmp_path):
    whole = {
        "strategy": "mirrored",
        "weights": "replicated",
        "optimizer_state": "replicated",
        "peak_memory": [51380224],
    }
    cut = {"weights": "sharded", "optimizer_state": "sharded", "mesh": {"shards": 2, "groups": 1}}
    runs = [made(tmp_path, "whole", **whole), made(tmp_path, "cut", **whole | cut, resumed_from_step=12)]
    slots = made(tmp_path, "slots", **whole | {"optimizer_state": "sharded", "peak_memory": []})
    text = report.write([*runs, slots], out=tmp_path / "page.html").read_text()
    tiles = re.findall(r"</b>(2 replicas, .*?), val_accuracy", text)
    assert tiles == [f"2 replicas, mirrored{more}" for more in ("", ", weights sharded", ", optimizer state sharded")]
    rows = {name: re.findall(r"<td>(.*?)</td>", row) for name, row in re.findall(r'"row">(.*?)</th>(.*)</tr>', text)}
    assert rows["weights at rest"] == ["replicated", "sharded", "replicated"]
    assert rows["optimizer state"] == ["replicated", "sharded", "sharded"]
    assert rows["mesh of what is sharded"] == ["", "shards 2, groups 1", ""]
    assert rows["most memory of tensors"] == ["51 MB", "51 MB", ""]
    assert rows["seconds of the last process"] == ["61", "61", "61"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    paths = [made(tmp_path / "first", "train"), made(tmp_path / "second", "train")]
    names = [run.name for run in told_apart([report.read(path) for path in paths])]
    assert names == ["first/train", "second/train"]
    assert [run.name for run in told_apart([report.read(paths[0])] * 2)] == ["train", "train"]


def test_a_launched_run_is_run_again_by_its_launcher(tmp_path):
    path = made(tmp_path)
    (tmp_path / "logs/job.json").write_text(json.dumps({"again": "toolkit launch --workers=2 -- train.py --token=s"}))
    assert "<pre>toolkit launch --workers=2 -- train.py &#39;--token=***&#39;</pre>" in report.write([path]).read_text()


def test_what_ray_has_started_shows_no_command(tmp_path):
    path = made(tmp_path, command=["python", "/site-packages/ray/_private/workers/default_worker.py", "--worker-id=7"])
    assert "default_worker" not in report.write([path]).read_text()


def test_a_column_has_as_many_decimals_in_each_row():
    assert column("loss", [2.3519, 0.5, None, 12]) == ["2.35", "0.50", "", "12.00"]
    assert column("learning_rate", [0.1, 0.08536, 0]) == ["0.1000", "0.0854", "0.0000"]
    assert column("epoch", [1.0, 2.0]) == ["1", "2"]
    assert column("tiny", [1e-7, 2e-5]) == ["1e-07", "2e-05"]
    assert column("accuracy", [0.5, 0.98765]) == ["50.00%", "98.77%"]
    assert column("examples_per_second", [235.6, 371.0, 1234.5]) == ["236", "371", "1,234"]


def test_metrics_of_any_model_have_keras_own_names(tmp_path):
    path = made(tmp_path, perplexity=12.5, val_perplexity=14.25, train_loss=2.0, loss=2.0, examples_per_second=10.5)
    rows = ["epoch,perplexity,loss,val_perplexity,images_per_second,examples_per_second,seconds", "1,20,3,21,10,10,2"]
    (path / "history.csv").write_text("\n".join([*rows, "2,12.5,2,14.25,11,11,2"]))
    text = report.write([path]).read_text()
    assert re.findall(r"<h3>(.*?)</h3>", text)[:2] == ["perplexity", "loss"]
    for name, value in (
        ("perplexity", "12.5"),
        ("val_perplexity", "14.25"),
        ("loss", "2"),
        ("examples per second", "10.5"),
    ):
        assert re.search(rf'<th scope="row">{name}</th><td>{value}</td>', text), name
    assert "images" not in text
    assert "train" not in text


@pytest.mark.slow
def test_of_very_many_metrics_the_first_are_drawn(tmp_path):
    path = made(tmp_path)
    names = [f"metric_{n}" for n in range(30)]
    (path / "history.csv").write_text("\n".join([f"epoch,{','.join(names)}", f"1,{','.join('1' * 30)}"]))
    text = report.write([path]).read_text()
    assert "12 of 30 metrics are drawn" in text
    assert "metric_29" in text
    assert len(re.findall(r"<h3>metric_", text)) == 12


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path):
    path = made(tmp_path)
    (path / "summary.json").unlink()
    (path / "history.csv").write_text("epoch,loss\n1,2.0\n2,nan\n")
    text = report.write([path]).read_text()
    assert "not finished" in text
    assert "it is running, or was killed" in text
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["loss"]


@pytest.mark.parametrize(
    "spoil", ["{", "[]", '{"step": 3, "parallelism": [1], "parameter_servers": "x", "command": 4}', ""]
)
def test_files_that_are_damaged_are_passed_over(tmp_path, spoil):
    path = made(tmp_path)
    (path / "summary.json").write_text(spoil)
    (path / "history.csv").write_bytes(b"epoch,loss\n\xff\x00,1\n")
    assert report.write([path]).exists()


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="there is no such directory"):
        report.write([tmp_path / "nowhere"])
    with pytest.raises(RunDirectoryError, match="it holds no run"):
        report.write([tmp_path])
    with pytest.raises(RequestError, match="Use --out to name a file in an existing directory"):
        report.write([made(tmp_path)], tmp_path / "nowhere" / "it.html")


@pytest.mark.slow
def test_a_device_is_written_to_and_a_link_followed(tmp_path):
    run = made(tmp_path)
    os.mkfifo(tmp_path / "pipe.html")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((tmp_path / "pipe.html").read_text)
        report.write([run], tmp_path / "pipe.html")
        assert "</html>" in read.result(20)
    assert (tmp_path / "pipe.html").is_fifo()
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    report.write([run], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["summary.json", "history.csv", ""])
def test_a_runs_own_files_are_not_written_over(tmp_path, name):
    run = made(tmp_path)
    with pytest.raises(RequestError, match="Name a file that ends in .html"):
        report.write([run], run / name)
    assert json.loads((run / "summary.json").read_text())["recipe"] == "cifar_mirrored"


ODD = {
    "step": [{"milliseconds": "x"}, {**STEP, "compute": None}, {**STEP, "compute": 1e308}, 5],
    "parallelism": [5, [{}], [{"conv": 1, "predicted_seconds": 1e308, "measured_seconds": 2}]],
    "parameter_servers": [{"steps_by_worker": [1]}, {"staleness": {"x": 1}}, {"staleness": {"1": "x"}}, []],
    "train_accuracy": [10**400, "x", [1]],
    "launch_logs": ["\0", "/dev/null", 5],
    "command": [["\ud800"], [1, None], "x"],
    "versions": [[1], {"x": [1]}],
    "status": [None, {"a": 1}],
}


@pytest.mark.parametrize("number", range(max(map(len, ODD.values()))))
@pytest.mark.filterwarnings("default")  # matplotlib's, of numbers that don't fit into a picture.
def test_whatever_a_summary_holds_there_is_a_page(tmp_path, number):
    odd = {key: values[number] for key, values in ODD.items() if number < len(values)}
    text = report.write([made(tmp_path, **odd)]).read_text()
    assert "</html>" in text
    assert "81.25%" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", "[" * 100_000),
        ("../logs/events.jsonl", '{"at": 1, "event": "started", "task": "a", "pid": [1]}\n' + "[" * 100_000),
        ("../logs/events.jsonl", '{"at": 1' + "0" * 400 + ', "event": "started", "task": "a", "pid": 1}'),
        ("history.csv", "epoch,loss\n1,1e308\n2,-1e308\n3,1e-320\n"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_whatever_is_in_the_files_there_is_a_page(tmp_path, file, content):
    path = made(tmp_path)
    (path / file).write_text(content)
    assert "</html>" in report.write([path]).read_text()


def test_training_that_diverged_is_said(tmp_path):
    path = made(tmp_path)
    (path / "history.csv").write_text("epoch,loss\n1,2.0\n2,nan\n")
    assert "training diverged" in report.write([path]).read_text()


@pytest.mark.slow
def test_many_runs_and_strange_names(tmp_path):
    names = ["back\\slash", "_under", "a$b$c", *map(str, range(7))]
    text = report.write([made(tmp_path, name) for name in names], tmp_path / "all.html").read_text()
    titles = [title.replace("&#39;", "'") for title in re.findall(r"<h3>(.*?)</h3>", text)]
    assert titles == PICTURES
    for name in names[:3]:
        assert f"{name} loss" in text


def test_tasks_are_told_apart_by_how_they_ended(tmp_path):
    spans = spans_of(report.read(made(tmp_path)), prefix="")
    assert [(span.task, round(span.end - span.start), span.ending) for span in spans] == [
        ("chief:0", 60, "done"),
        ("worker:0", 20, "SIGKILL"),
        ("worker:0", 40, "ended by the launcher"),
    ]


@browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "flags"), [(1280, ()), (500, ()), (1280, ("--force-dark-mode",))])
def test_in_a_browser_all_pictures_are_there_and_nothing_is_asked_of_a_network(tmp_path, width, flags):
    page = report.write([made(tmp_path, "it's"), made(tmp_path, "second")], tmp_path / "both.html")
    plain = look(page, tmp_path, *flags, width=width)
    assert plain.console == []
    assert plain.requests == []
    measured = look(page, tmp_path, *flags, width=width, measure=True).seen
    assert [title for title, *_ in measured["figures"]] == PICTURES
    assert all(w >= min(360, width - 120) and h > 90 for _, w, h in measured["figures"])
    assert measured["overflow"] <= 0, "the page is wider than the screen"
    assert measured["ink"] == measured["label"], "a chart's text has another colour than the page's"
    dark = sum(map(int, re.findall(r"\d+", measured["paper"])[:3])) < 300
    assert dark == bool(flags)


@browser
@pytest.mark.slow
def test_the_browser_would_have_noticed(tmp_path):
    """A page with an error and a picture from elsewhere, so that the test above can fail."""
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = pathlib.Path(tmp_path, "bad.html")
        address = f"http://127.0.0.1:{server.server_port}/x.png"
        page.write_text(f"<img src='{address}'><script>console.error('oh')</script>")
        seen = look(page, tmp_path)
        server.shutdown()
    assert asked == ["/x.png"]
    assert address in seen.requests
    assert any("oh" in line for line in seen.console)


def test_where_the_time_of_a_run_went_is_said(tmp_path):
    seconds = {"progress": 80.0, "restarting": 15.0, "done_twice": 5.0}
    run = made(tmp_path, goodput={"share": 0.8, "seconds": seconds})
    report.write([run], out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "80% of 100 s made progress; 15% restarting, 5% steps done twice." in page
