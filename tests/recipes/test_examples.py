"""The tutorials' examples, and the samples of docs/from-tf1.md: they run, and show what they say."""

import re

import processes
import pytest

pytestmark = pytest.mark.slow


def program(folder, *arguments, limit=200):
    done = processes.python(folder, *arguments, limit=limit)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.returncode, done.stdout, done.stderr


def test_matmul_gives_numpys_sum_on_one_and_two_devices_and_a_chart(tmp_path):
    flags = ("--size=300", "--power=10", "--rounds=1", "--chart=it's.png")
    code, out, err = program(tmp_path, "-m", "recipes.matmul_devices", *flags)
    assert code == 0, err
    errors = [float(error) for error in re.findall(r"devices? \(.*?\) .* (\d\.\de-\d\d)", out)]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    assert (tmp_path / "it's.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("recipe", "flag", "said"),
    [
        ("matmul_devices", "--chart=it.txt", "charts are PNG or SVG"),
        ("matmul_devices", "--chart=nowhere/it.png", "there is no such directory"),
        ("matmul_devices", "--power=0", "--power=0"),
        ("matmul_devices", "--size=1000000", "are free"),
        ("matmul_devices", "--gpus=3", "the sum has two terms"),
        ("device_placement", "--only=name", "there is no such example"),
    ],
)
def test_mistakes_are_answered(tmp_path, recipe, flag, said):
    code, _, err = program(tmp_path, "-m", f"recipes.{recipe}", flag)
    assert code == 2
    assert said in err


@pytest.mark.long
def test_placement_shows_each_example(tmp_path):
    code, out, err = program(tmp_path, "-m", "recipes.device_placement")
    assert code == 0, err
    for words in (
        "asked for CPU:1, the product is on /job:localhost/replica:0/task:0/device:CPU:1",
        "soft: there is no GPU:7 in this process",
        "hard: InvalidArgumentError",
        "NcclAllReduce has kernels for GPU",
        "copied: MatMul_1:0 from CPU:1 to CPU:0, 8,192 bytes",
        "--inter_op_threads=2: two branches, five times: ",
        "counted, then read: 1, then 2",
        "--memory=4096: 4096 MiB",
        "asked for task 1, the sum is on /job:worker/replica:0/task:1/device:CPU:0",
        "variable 3 is on /job:ps/replica:0/task:1/device:CPU:0",
    ):
        assert words in out, out


def test_the_samples_from_tensorflow_1_run(tmp_path):
    text = (processes.ROOT / "docs/from-tf1.md").read_text()
    samples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(samples) >= 6
    (tmp_path / "samples.py").write_text("\n\n".join(samples))
    code, out, err = program(tmp_path, "samples.py")
    assert code == 0, err[-3000:]
    assert "[[11.]]" in out
    assert "copied: " in out
    assert '"task":{"type":"ps","index":0}' in out
