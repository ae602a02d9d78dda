import re
import subprocess
import sys

import pytest

from toolkit.cli import main as command
from toolkit.cli.main import main


@pytest.fixture
def toolkit(capsys):
    """Runs `toolkit` in this process; returns its exit code and what it wrote."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return (ended.value.code, *capsys.readouterr())

    return run


def test_help_lists_the_commands(toolkit):
    code, out, _ = toolkit("--help")
    assert code == 0
    assert "tf-config" in out
    assert toolkit("-h")[1] == out


@pytest.mark.parametrize("name", sorted(command._COMMANDS))
def test_what_a_commands_module_cannot_import_is_said(monkeypatch, name):
    module = command._COMMANDS[name][0].partition(":")[0]
    monkeypatch.setitem(sys.modules, f"toolkit.cli.{module}", None)
    monkeypatch.delattr(f"toolkit.cli.{module}", raising=False)
    with pytest.raises(ImportError, match=f"toolkit.cli.{module}"):
        main([name, "--help"])


@pytest.mark.parametrize("name", sorted(command._COMMANDS))
def test_every_command_has_help_that_says_what_it_does(toolkit, name):
    code, out, _ = toolkit(name, "--help")
    assert code == 0
    assert f"usage: toolkit {name}" in out
    assert len(out.splitlines()) > 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: `toolkit`, but the command is missing. `toolkit --help` lists them all.\n"),
        (("tf_config",), "Did you mean tf-config?"),
        (("frobnicate",), "error: command frobnicate, but there is no such command. `toolkit --help`"),
        (("tf-config",), "but ACTION is missing"),
        (("launch", "--wokers=2", "x.py"), "Did you mean --workers?"),
        (("launch", "--gpus=2", "x.py"), "there is no such option. Did you mean --gpus_per_node?"),
        (("launch", "--qoss=2", "x.py"), "Did you mean --qos?"),
        (("tf-config", "chek"), "Did you mean check? `toolkit tf-config --help`"),
        (("tf-config", "generate", "--wroker=a:1"), "Did you mean --worker? `toolkit tf-config generate --help`"),
        (("tf-config", "generate", "--work=a:1"), "no such option"),
        (("tf-config", "generate", "--task"), "--task, but expected one argument"),
        (("tf-config", "check", "a", "b"), "the argument 'b'"),
    ],
)
def test_a_wrong_command_line_ends_in_a_message_and_2(toolkit, arguments, message):
    code, out, err = toolkit(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")


def test_ctrl_c_ends_in_130(toolkit, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert toolkit("tf-config") == (130, "", "Interrupted.\n")


@pytest.mark.slow
def test_it_is_a_module_too_and_imports_nothing_heavy():
    code = (
        "import sys; from toolkit.cli import main\n"
        "try: main.main(['tf-config', 'generate', '--worker=a:1', '--task=worker:0'])\n"
        "except SystemExit: print([m for m in ('tensorflow', 'keras', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    done = subprocess.run([sys.executable, "-m", "toolkit", "nix"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_has_enough_is_no_error():
    workers = " ".join(f"--worker=host{i}:1" for i in range(500))
    line = f"{sys.executable} -m toolkit tf-config generate --all {workers} | head -n 1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("export TF_CONFIG=")
    assert done.stderr == ""


def test_the_version_is_said_with_those_of_what_it_trains_with(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"toolkit \d\S+, Python 3\.\S+, keras 3\.\S+, tensorflow 2\.\S+\n", capsys.readouterr().out)
