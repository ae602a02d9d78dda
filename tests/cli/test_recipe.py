"""`toolkit recipe`."""

import os
import pathlib
import subprocess
import sys

import processes
import pytest
from absl import flags

from toolkit.cli.flags import defined
from toolkit.cli.main import main

NAMES = sorted(file.stem for file in (processes.ROOT / "recipes").glob("[a-z]*.py"))


def test_it_lists_them_with_what_each_does(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["recipe"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == NAMES
    assert all(len(line) <= 80 for line in lines)


def test_a_wrong_name_is_refused_with_one_that_is_near(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["recipe", "cifar_mirored", "--gpus=2"])
    assert ended.value.code == 2
    assert "recipe cifar_mirored, but there is no such recipe. Did you mean cifar_mirrored?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("way", [["-m", "toolkit"], [str(pathlib.Path(sys.executable).with_name("toolkit"))]])
def test_a_folder_called_recipes_is_in_nobodys_way(tmp_path, way):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    command = [*([sys.executable] if way[0] == "-m" else []), *way, "recipe", "matmul_devices", "--size=8", "--power=2"]
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "seconds" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "needs"),
    [("--gpus=two", "it needs a whole number"), ("--learning_rate=fast", "it needs a number")],
)
def test_what_is_no_number_is_refused_in_plain_words(tmp_path, flag, needs):
    done = processes.python(tmp_path, "-m", "recipes.cifar_mirrored", flag)
    assert done.returncode == 2
    assert f"error: {flag}, but {needs}. --help lists the flags and their values." in done.stderr


@pytest.mark.slow
def test_a_librarys_flags_are_no_recipes():
    """A resumed run is compared with the values of its own, and TensorFlow's depend on when it is imported."""
    from tensorflow.python.ops.parallel_for import pfor  # noqa: F401 - It defines one.

    assert "op_conversion_fallback_to_while_loop" in flags.FLAGS
    assert not {"op_conversion_fallback_to_while_loop", "verbosity"} & {flag.name for flag in defined()}
