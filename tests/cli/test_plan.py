"""`toolkit plan`: its tables, its chart, its JSON, and what it refuses."""

import json
import re
import xml.etree.ElementTree

import pytest
import rich

from toolkit.cli import main as main_module
from toolkit.cli.main import main
from toolkit.parallel import Plan
from toolkit.parallel.plan.step_cost import LEAST_STEP


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
    assert (
        "head/fc1: by outputs, kept: exchanges 6.29 MB of activations between hosts (67.3 ms) "
        "instead of 101 MB of gradients between hosts (805.7 ms)." in " ".join(out.split())
    )
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


@pytest.mark.slow
def test_what_memory_allows_is_chosen_and_said(capsys, tmp_path):
    given = ["vit", "--replicas=8", "--device=V100", "--global_batch_size=4096", "--slots=2"]
    _, free, _ = plan(capsys, *given)
    assert "Memory of a replica: 2.0" in free
    assert "The plan is" not in free
    code, out, _ = plan(capsys, *given, "--memory=1.2GB", f"--save={tmp_path / 'plan.json'}")
    assert code == 0
    assert "The plan is with gradient_accumulation_steps=2 and batches of 2048." in out
    assert Plan.load(tmp_path / "plan.json").setting.micro_steps == 2
    _, small, _ = plan(capsys, *given, "--memory=8MB", "--json")
    found = json.loads(small)
    assert (found["weights"], found["optimizer_state"], found["micro_steps"]) == ("sharded", "replicated", 256)
    assert sum(found["memory"].values()) == pytest.approx(found["step"]["memory"])
    code, out, _ = plan(capsys, *given, "--memory=1MB")
    assert code == 2
    assert "It doesn't fit into 1 MB: " in out
    assert "Apply the plan" not in out


def test_shards_are_said(capsys):
    given = ["alexnet", "--replicas=4", "--hosts=2", "--bandwidth=1Gbit", "--device=V100"]
    _, out, _ = plan(capsys, *given, "--json")
    assert json.loads(out)["shards"] in (2, 4)
    _, out, _ = plan(capsys, *given, "--shards=2", "--shard_optimizer")
    assert "The plan is with --shards=2, --shard_optimizer." in out


@pytest.mark.parametrize(
    ("bandwidth", "says"), [("1Gbit", "on this network that is hopeless"), ("100Gbit", "Weights in shards: a replica")]
)
def test_what_weights_in_shards_cost_on_a_network_is_said(capsys, bandwidth, says):
    given = ["vit", "--replicas=8", "--hosts=8", "--device=V100", "--slots=2", "--global_batch_size=512"]
    _, out, _ = plan(capsys, *given, f"--bandwidth={bandwidth}", "--shard_weights")
    out = " ".join(out.split())
    assert 'The plan is with --shard_weights, in a script create(weights="sharded").' in out
    assert says in out
    assert ("hopeless" in out) is (bandwidth == "1Gbit")


def test_weights_in_shards_are_no_matter_where_all_large_layers_are_sharded(capsys, tmp_path):
    body = (
        "import keras\nfrom keras.layers import Dense\n\ndef build():\n    stack = [Dense(512), Dense(512), Dense(2)]\n"
    )
    (tmp_path / "models.py").write_text(body + "    return keras.Sequential([keras.Input((512,)), *stack])\n")
    given = [f"{tmp_path / 'models.py'}:build", "--replicas=2", "--hosts=2", "--device=V100", "--bandwidth=1Gbit"]
    _, out, _ = plan(capsys, *given, "--global_batch_size=128", "--shard_weights")
    assert "Weights in shards change nothing: this plan shards the layers" in " ".join(out.split())
    assert "hopeless" not in out


REFUSED = {
    "shards": (["alexnet", "--device=5", "--replicas=4", "--shards=3"], "3 shards of 4 replicas"),
    "no shards": (["alexnet", "--device=5", "--shards=0"], "--shards=0"),
    "memory without a unit": (["alexnet", "--device=5", "--memory=8"], "memory '8'"),
    "no model": ([], "MODEL"),
    "no such model": (["resnet", "--device=5"], "'resnet'"),
    "no speed": (["alexnet"], "nothing says how fast they are"),
    "two speeds": (["alexnet", "--device=5", "--measure"], "both --device and --measure"),
    "no such device": (["alexnet", "--device=abacus"], "'abacus'"),
    "no unit": (["alexnet", "--device=5", "--bandwidth=10"], "no unit: bits or bytes"),
    "nothing between hosts": (
        ["alexnet", "--device=5", "--hosts=2"],
        "nothing gives the speed of the network between them",
    ),
    "more hosts than replicas": (["alexnet", "--device=5", "--hosts=4", "--bandwidth=1Gbit"], "there are 2 replicas"),
    "no length": (["alexnet", "--device=5", "--length=0"], "--length=0"),
    "no replicas": (["alexnet", "--device=5", "--replicas=0"], "--replicas=0"),
    "latency": (["alexnet", "--device=5", "--latency=-2"], "at least 0 microseconds"),
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


SCRIPT = """
import keras
def build():
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(1000, 64)(inputs)
    x = keras.layers.MultiHeadAttention(4, 16)(x, x)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x)), name="any_length")
"""


def test_a_step_is_no_shorter_than_its_overhead(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(
        "import keras\ndef build(): return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])\n"
    )
    _, out, _ = plan(capsys, "tiny.py:build", "--device=H100")
    rates = [float(found.replace(",", "")) for found in re.findall(r"(?:alone|parallel|planned) +\S+ +([\d,]+) ", out)]
    assert len(rates) == 4
    assert max(rates) <= 2 * 64 / LEAST_STEP
    assert " 0.0 " not in out.partition("replicas  ")[2]
    assert "Limited by overhead: one replica computes for <0.1 ms, and to start a step takes about 1.0 ms" in out
    assert "Limited by overhead" not in plan(capsys, "small_cnn", "--device=H100", "--global_batch_size=4096")[1]


def test_an_h200_is_near_what_was_measured(capsys):
    """docs/measured.md: 207,174 examples a second of plain Keras with XLA, and 86,178 without."""
    for card, least, most in (("H200", 86_178, 1.05 * 207_174), ("H100", 86_178, 207_174)):
        _, out, _ = plan(capsys, "small_cnn", f"--device={card}", "--global_batch_size=4096", "--json")
        assert least < 2048 / json.loads(out)["scaling"][0]["milliseconds"]["data"] * 1e3 < most


def test_a_length_that_a_model_leaves_open_is_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_any_length.py").write_text(SCRIPT)
    code, _, err = plan(capsys, "of_any_length:build", "--device=500")
    assert code == 2
    assert "any_length" in err
    assert "--length=128" in err
    code, out, _ = plan(capsys, "of_any_length:build", "--device=500", "--length=128")
    assert code == 0
    # 4 products of 64 x 64 for each word, two of 128 x 64 for each, and the last layer.
    assert f"{128 * (4 * 64 * 64 + 2 * 128 * 64) / 1e6:.3g}M multiply-adds" in out
    code, out, _ = plan(capsys, "of_any_length:build", "--device=500", "--length=256", "--json")
    layers = {layer["kind"]: layer for layer in json.loads(out)["layers"]}
    assert layers["MultiHeadAttention"]["splits"] == {"heads": 4}
    assert layers["MultiHeadAttention"]["multiply_adds"] == 256 * (4 * 64 * 64 + 2 * 256 * 64)


def test_it_ends_with_what_to_do(capsys):
    slow = ("alexnet", "--replicas=8", "--hosts=2", "--bandwidth=1Gbit", "--device=V100")
    code, out, _ = plan(capsys, *slow)
    assert code == 0
    assert re.search(
        r"At 1Gbit stay on one host: [23]\.\d\dx with 4 devices there, 0\.\d\dx with 8 devices on 2 hosts", out
    )
    assert "--replicas=4 --hosts=1" in out
    assert "From 100 Gbit/s between them on, 2 hosts are faster" in out
    _, out, _ = plan(capsys, "alexnet", "--replicas=4", "--device=V100")
    assert re.search(r"4 devices come to [23]\.\d\dx the speed of one\.\nApply the plan with toolkit\.parallel", out)
    _, out, _ = plan(capsys, "small_cnn", "--replicas=2", "--device=V100", "--inside=1MB")
    assert "Train on one device: 2 of them come to 0." in out
    slow = ("--hosts=2", "--bandwidth=1Gbit", "--inside=1MB", "--device=V100")
    _, out, _ = plan(capsys, "small_cnn", "--replicas=8", *slow)
    assert "Train on one device: it is the fastest at 1Gbit. Predicted: 0." in out
    assert "4 devices on one host.\n" in out
    _, out, _ = plan(capsys, "small_cnn", "--replicas=1", "--device=V100")
    assert "speed of one" not in out


@pytest.mark.parametrize("command", main_module._COMMANDS)
def test_help_fits_a_terminal(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    prose = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")]
    assert max(map(len, prose)) <= 80
