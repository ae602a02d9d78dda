"""`toolkit plan`: its tables, its chart, its JSON, and what it refuses."""

import json
import xml.etree.ElementTree

import pytest
import rich

from toolkit.cli.main import main


def plan(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return ended.value.code, out, err


def test_the_table_says_what_and_why(capsys, monkeypatch):
    monkeypatch.setattr(rich.get_console(), "width", 80)  # It has read COLUMNS once and for all.
    code, out, err = plan(capsys, "alexnet", "--replicas=4", "--hosts=2", "--bandwidth=1Gbit", "--device=V100")
    assert (code, err) == (0, "")
    assert "head/fc1: by outputs, kept: 6.29 MB of activations are exchanged instead of 101 MB of gradients." in out
    assert "50% of its" in out, "the share of a data sheet's speed is an assumption, and is said"
    for words in ("data parallel", "model parallel", "as planned", "speed-up", "memory"):
        assert words in out
    tables = [line for line in out.splitlines() if not line.endswith(".")]
    assert max(map(len, tables)) <= 80


def test_json(capsys):
    code, out, _ = plan(capsys, "small_cnn", "--replicas=8", "--device=500", "--json", "--most=16")
    assert code == 0
    found = json.loads(out)
    assert found["replicas"] == 8
    assert [row["replicas"] for row in found["scaling"]] == [1, 2, 4, 8, 16]
    assert found["step"]["seconds"] == pytest.approx(
        sum(found["step"][part] for part in ("computing", "updating", "exchanging", "fixed"))
    )
    layer = next(layer for layer in found["layers"] if layer["name"] == "trunk/conv1")
    assert layer["choice"] == "replicated"
    assert layer["reason"]


def test_a_chart_is_a_picture(capsys, tmp_path):
    path = tmp_path / "a plan's.svg"
    code, out, _ = plan(capsys, "small_cnn", "--device=500", f"--chart={path}")
    assert code == 0
    assert path.name in out
    text = path.read_text()
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert plan(capsys, "small_cnn", "--device=500", f"--chart={tmp_path / 'plan.png'}")[0] == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "no model": ([], "MODEL"),
    "no such model": (["resnet", "--device=5"], "'resnet'"),
    "no speed": (["alexnet"], "nothing says how fast they are"),
    "two speeds": (["alexnet", "--device=5", "--measure"], "both --device and --measure"),
    "no such device": (["alexnet", "--device=abacus"], "'abacus'"),
    "no unit": (["alexnet", "--device=5", "--bandwidth=10"], "no unit: bits or bytes"),
    "nothing between hosts": (["alexnet", "--device=5", "--hosts=2"], "nothing says what joins them"),
    "more hosts than replicas": (["alexnet", "--device=5", "--hosts=4", "--bandwidth=1Gbit"], "there are 2 replicas"),
    "no replicas": (["alexnet", "--device=5", "--replicas=0"], "--replicas=0"),
    "overlap": (["alexnet", "--device=5", "--overlap=2"], "overlap is from 0 to 1"),
    "a chart of another kind": (["alexnet", "--device=5", "--chart=plan.gif"], "PNG or SVG"),
    "a chart nowhere": (["alexnet", "--device=5", "--chart=/absent/plan.png"], "there is no such directory"),
    "no such option": (["alexnet", "--devices=5"], "--device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_said(capsys, case):
    arguments, says = REFUSED[case]
    code, out, err = plan(capsys, *arguments)
    assert code == 2, out
    assert says in err
